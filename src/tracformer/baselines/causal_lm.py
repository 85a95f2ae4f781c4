"""Any causal language model of `transformers` as a model that fills blanks.

The input rows are those of AC-GPT and Compact (`given_first.py`): the given tokens at their true
positions, then the body, left to right. A causal model can read them as it is, since `position_ids`
and a mask (B, 1, S, S) are all that they need; a short fine-tuning teaches it to use the prefix.
Mode `ar` is the model as it was published.

- `CausalLM`: the model; `from_pretrained` reads a folder of `transformers`, or an adapter.
- An adapter is a folder with the trained tensors alone: matrices of low rank beside each linear map
  (LoRA), or all weights. Its `config.json` names the base model and holds its fingerprint.
- `CausalLMCache`: keys and values for generation; the prefix is computed once.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from tracformer.baselines.causal_networks import (
    add_adapter,
    check_network,
    check_published,
    fingerprint,
    longest_text,
    quiet,
    read_network,
    read_settings,
    transformers_package,
)
from tracformer.baselines.causal_training import choose_attention, train_fast
from tracformer.baselines.given_first import Rows, arrange, body_rows, packed, row_flags
from tracformer.baselines.row_cache import LayerMemory, RowCache
from tracformer.baselines.transformer import DenseModel, pick, shifted_right
from tracformer.devices import require_memory
from tracformer.model import storage
from tracformer.model.base import EXACT
from tracformer.model.batch import Batch
from tracformer.model.config import ModelConfig

BODIES = ("full", "compact")
PREFIXES = ("bidirectional", "causal")
ADAPTER = ".lora_"  # in the name of every tensor of an adapter of low rank


@dataclass(frozen=True)
class CausalLMConfig(ModelConfig):
    """What an adapter was made for, and how."""

    model_type = "causal-lm"
    possible_modes = ("car", "ar")
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    changeable = ("modes", "body", "prefix", "rank")

    base: str = ""  # the base model: a folder, a hub id, or a name that `tracformer.load` knows
    base_fingerprint: str = ""
    start_id: int = 0  # the token before the first one
    body: str = "compact"  # "full": the whole text; "compact": the blanks alone (given_first.py)
    prefix: str = "bidirectional"  # whether given tokens see those after them; "causal": they don't
    rank: int = 16  # of the adapter's matrices; 0: all weights are trained
    # Modes in which the adapter is on. In `ar`, without it, the model is the base model.
    adapted: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "adapted", tuple(self.adapted))
        for field, allowed in (("body", BODIES), ("prefix", PREFIXES)):
            if getattr(self, field) not in allowed:
                raise ValueError(
                    f"{field} is {getattr(self, field)!r}; allowed: {', '.join(allowed)}"
                )
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 0:
            raise ValueError(f"rank is {self.rank!r}; it must be a positive integer, or 0")

    @classmethod
    def modes_trained_by(cls, modes: set[str], values: Mapping[str, Any]) -> set[str]:
        """Return the modes after training in `modes`: without the adapter there is also `ar`."""
        return modes if values.get("rank") == 0 else modes | {"ar"}


class CausalLM(DenseModel):
    """A causal language model of `transformers`, with or without an adapter.

    Args:
        config: The configuration.
        network: The network with its output matrix, such as a `LlamaForCausalLM`.

    Raises:
        ValueError: The network does not take positions or masks, or changes its logits afterwards.
    """

    config: CausalLMConfig
    config_class = CausalLMConfig
    answers = {"car": EXACT, "ar": EXACT}  # noqa: RUF012
    limits = {"ar": "does not see the text after a blank"}  # noqa: RUF012
    built_on_meta: ClassVar[bool] = False

    def __init__(self, config: CausalLMConfig, network: Any) -> None:
        super().__init__()
        self.config, self.network = config, network
        self._adapter_on = True

    # ---- the network

    @property
    def embedding(self) -> nn.Module:
        """The input embedding."""
        module: nn.Module = self.network.get_input_embeddings()
        return module

    @property
    def head(self) -> Tensor:
        matrix: Tensor = self.network.get_output_embeddings().weight
        return matrix[: self.config.vocab_size]

    @property
    def head_bias(self) -> Tensor | None:
        bias: Tensor | None = getattr(self.network.get_output_embeddings(), "bias", None)
        return None if bias is None else bias[: self.config.vocab_size]

    def blocks(self) -> list[nn.Module]:
        layers = self.network.config.num_hidden_layers
        found = (m for m in self.network.modules() if isinstance(m, nn.ModuleList))
        return list(next(m for m in found if len(m) == layers))

    def embedding_tables(self) -> list[Tensor]:
        table: Tensor = self.network.get_input_embeddings().weight
        return [table]

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        named = dict(self.named_parameters())
        if not self.config.rank:
            return named
        return {name: parameter for name, parameter in named.items() if ADAPTER in name}

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.trained_parameters())

    def read(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Return features (B, S, d).

        Args:
            ids: (B, S) token ids.
            positions: (B, S) positions. None: 0 to S - 1.
            mask: (B, S, K) bool, which keys each token reads. None: itself and those before it.
            cache: Takes keys and values of each layer, and returns those to read.
        """
        return read_network(self.network, ids, positions, mask, cache)

    def use_adapter(self, mode: str) -> None:
        """Switch the adapter on or off, as a mode asks for."""
        wanted = mode in self.config.adapted
        if self.config.rank and wanted != self._adapter_on:
            for module in self.network.modules():
                if hasattr(module, "enable_adapters") and hasattr(module, "base_layer"):
                    module.enable_adapters(wanted)
            self._adapter_on = wanted

    # ---- answers

    def hidden(self, batch: Batch, mode: str, wanted: Tensor) -> tuple[Tensor, Tensor]:
        if self.checkpoint_activations and not self.network.is_gradient_checkpointing:
            self.network.gradient_checkpointing_enable({"use_reentrant": False})
        self.use_adapter(mode)
        choose_attention(self.network, batch.device, 2 * batch.width)
        return super().hidden(batch, mode, wanted)

    def states(self, batch: Batch, mode: str, wanted: Tensor) -> Tensor:
        if mode == "ar":
            return pick(self.read(shifted_right(batch.tokens, self.config.start_id)), wanted)
        given, needed = row_flags(batch, mode, wanted, self.config.body)
        rows = arrange(batch, given, needed, self.config.start_id)
        before, present = given.sum(1), torch.arange(rows.ids.shape[1], device=batch.device)
        present = torch.cat(
            (rows.given, present[: rows.mask.shape[1]] < needed.sum(1)[:, None]), dim=1
        )
        features = self.read(*without_gaps(rows, present, self.config.prefix))
        row, position = wanted.nonzero(as_tuple=True)
        picked: Tensor = features[row, before[row] + rows.body[row, position]]
        return picked

    def empty_cache(self, mode: str, rows: int, length: int) -> "CausalLMCache":
        return CausalLMCache(self, mode, rows, length)

    # ---- adapters

    def adapt(self, config: CausalLMConfig, modes: Sequence[str]) -> None:
        """Make the model ready for training under another configuration.

        Args:
            config: The configuration to train.
            modes: Modes to train; the adapter is on in these.

        Raises:
            ValueError: The model has an adapter already, of another shape.
        """
        before = self.config
        if before.adapted:
            for key in ("rank", "body", "prefix", "adapted"):
                old = getattr(before, key)
                new = tuple(m for m in config.possible_modes if m in modes)
                new = new if key == "adapted" else getattr(config, key)
                if old != new:
                    raise ValueError(
                        f"{'modes' if key == 'adapted' else f'model.{key}'} is {new!r}, but the "
                        f"adapter to start from has {old!r}; use the same, or start from "
                        f"{before.base}"
                    )
        elif config.rank:
            add_adapter(self.network, config.rank)
            train_fast(transformers_package(), self.network)
        adapted = tuple(mode for mode in config.possible_modes if mode in modes)
        self.config = dataclasses.replace(config, adapted=adapted)

    def card(self, training: str) -> str:
        """Return a model card as Markdown.

        Args:
            training: How it was trained, a sentence.
        """
        config = self.config
        kind = f"LoRA of rank {config.rank}" if config.rank else "all weights"
        return f"""---
library_name: tracformer
base_model: {config.base}
tags: [tracformer, infilling]
---

# Adapter for filling blanks with {config.base}

Made with tracformer: the base model reads the given tokens of a text first, at their true
positions, then predicts the missing ones from left to right (body "{config.body}", prefix
"{config.prefix}"). The adapter holds {kind}, {self.num_trained() / 1e6:.1f}M numbers; the weights
of the base model are not in this folder, and its license applies to them.

{training}

```python
import tracformer

lm = tracformer.load("FOLDER")  # loads {config.base} too
print(lm.infill("The capital of France is [[1-2]], a city on the Seine.")[0].text)
```

Modes: {", ".join(config.modes)}. Fingerprint of the base model: `{config.base_fingerprint}`.
"""

    def num_trained(self) -> int:
        """Return the number of trained parameters."""
        return sum(parameter.numel() for parameter in self.trained_parameters().values())

    # ---- files

    @classmethod
    def from_pretrained(
        cls,
        folder: str | PathLike[str],
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        document: Mapping[str, Any] | None = None,
        base: str | PathLike[str] | None = None,
        vocab_size: int | None = None,
        **options: Any,
    ) -> Self:
        """Load a folder of `transformers`, or an adapter with its base model, in eval mode.

        Args:
            folder: A folder of `transformers`, or an adapter's.
            dtype: Type of the weights.
            device: Device of the weights.
            document: Content of `config.json`, if the caller has read it already.
            base: For an adapter, the folder of its base model.
            vocab_size: Number of tokens of the tokenizer. None: rows of the output matrix.
            **options: None are known.

        Raises:
            FileNotFoundError: A file is missing.
            ValueError: The model cannot be used, or the adapter was made for another one.
        """
        if options:
            raise ValueError(f"unknown option {next(iter(options))!r} of a causal language model")
        document = storage.load_document(folder) if document is None else document
        if document.get("model_type") != cls.config_class.model_type:
            return cls._from_base(Path(folder), dtype, device, document, vocab_size)
        config = storage.load_config(folder, cls.config_class, document)
        if base is None:
            raise ValueError(f"{folder} is an adapter; load it with tracformer.load")
        model = cls._from_base(
            Path(base), dtype, device, storage.load_document(base), config.vocab_size
        )
        if model.config.base_fingerprint != config.base_fingerprint:
            raise ValueError(
                f"{folder} is an adapter for another model than {base}: it was made for "
                f"{config.base!r} with fingerprint {config.base_fingerprint[:12]}, and this one "
                f"has {model.config.base_fingerprint[:12]}"
            )
        model.adapt(config, config.adapted)
        expected = {name: tuple(tensor.shape) for name, tensor in model.tensors().items()}
        weights = storage.load_weights(folder, expected, dtype, device)
        model.to(device).load_state_dict(weights, strict=False)
        return model.eval()

    @classmethod
    def _from_base(
        cls,
        folder: Path,
        dtype: torch.dtype,
        device: str | torch.device,
        document: Mapping[str, Any],
        vocab_size: int | None,
    ) -> Self:
        transformers = transformers_package()
        check_published(folder, document)
        settings = read_settings(folder)
        with torch.device("meta"):  # sizes without memory
            shape = transformers.AutoModelForCausalLM.from_config(settings)
        numbers = sum(parameter.numel() for parameter in shape.parameters())
        require_memory(numbers * dtype.itemsize, f"the model of {folder}")
        try:
            with quiet(transformers):
                network, found = transformers.AutoModelForCausalLM.from_pretrained(
                    folder,
                    config=settings,
                    dtype=dtype,
                    output_loading_info=True,
                    trust_remote_code=False,
                    local_files_only=True,
                )
        except RuntimeError as error:  # tensors of other shapes
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"the weights of {folder} do not fit its config.json: {reason}"
            ) from None
        if missing := sorted(map(str, found["missing_keys"])):
            raise ValueError(
                f"the weights of {folder} lack {missing[0]}"
                + (f" and {len(missing) - 1} other tensors" if len(missing) > 1 else "")
                + " of the model that its config.json describes"
            )
        network = network.to(device).eval().requires_grad_(True)
        rows = len(network.get_output_embeddings().weight)
        if vocab_size is not None and vocab_size > rows:
            raise ValueError(
                f"the tokenizer has {vocab_size} tokens and the model of {folder} only {rows}; "
                "they do not belong together"
            )
        check_network(network, str(folder))

        starts = [getattr(settings, f"{name}_token_id", None) for name in ("bos", "eos")]
        starts = [start[0] if isinstance(start, list) else start for start in starts]
        config = CausalLMConfig(
            vocab_size=vocab_size or rows,
            max_length=longest_text(document),
            modes=("ar",),
            base=str(folder),
            base_fingerprint=fingerprint(network),
            start_id=next((start for start in starts if start is not None), 0),
            rank=0,
        )
        return cls(config, network)


def whole_mask(rows: Rows, prefix: str) -> Tensor:
    """Return (B, P + S, P + S) bool: what each input row reads.

    Args:
        rows: Prefix and body rows.
        prefix: "bidirectional" or "causal".
    """
    return torch.cat(
        (nn.functional.pad(prefix_mask(rows.given, prefix), (0, rows.mask.shape[1])), rows.mask), 1
    )


def without_gaps(rows: Rows, present: Tensor, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids (B, W), positions (B, W) and mask (B, W, W), padded at the end only.

    Args:
        rows: Prefix and body rows, each with padding.
        present: (B, P + S) bool, False in the padding.
        prefix: "bidirectional" or "causal".
    """
    order, _ = packed(present)
    mask = whole_mask(rows, prefix)
    mask = mask.gather(1, order[..., None].expand(-1, -1, mask.shape[2]))
    mask = mask.gather(2, order[:, None].expand(-1, order.shape[1], -1))
    return rows.ids.gather(1, order), rows.positions.gather(1, order), mask


def prefix_mask(present: Tensor, prefix: str) -> Tensor:
    """Return (B, P, P) bool: what each prefix row reads; padding reads itself.

    Args:
        present: (B, P) bool, False in the padding.
        prefix: "bidirectional" or "causal".
    """
    P = present.shape[1]
    mask = present[:, None].expand(-1, P, -1)
    if prefix == "causal":
        mask = mask.tril()
    return mask | torch.eye(P, dtype=torch.bool, device=present.device)


# ---- generation


class CausalLMCache(RowCache):
    """Keys and values of given tokens and body rows.

    Slot 0 takes what padding writes. Then come the given tokens, and then the body rows, in order:
    a body row reads all slots up to its own.
    """

    model: CausalLM
    prefix: Tensor  # (rows,) number of given tokens in the prefix
    body: Tensor  # (rows, length) bool: predicted by a row of the body

    def slots_for(self, length: int) -> int:
        return 2 * length + 1

    def row_state(self, rows: int, length: int, weight: Tensor) -> dict[str, Tensor]:
        counts = torch.zeros(rows, dtype=torch.int64, device=weight.device)
        flags = torch.zeros(rows, length, dtype=torch.bool, device=weight.device)
        return {"prefix": counts, "body": flags}

    def make_layers(self, rows: int, weight: Tensor) -> list[Any]:
        return [LayerMemory(rows) for _ in self.model.blocks()]

    def read_given(self, rows: Tensor, batch: Batch) -> None:
        model, config = self.model, self.model.config
        given = batch.context if self.mode == "car" else torch.zeros_like(batch.context)
        hidden = ~given & batch.inside()
        kind = config.body if self.mode == "car" else "ar"
        self.body[rows, : batch.width] = body_rows(hidden, hidden, kind)
        self.prefix[rows] = given.sum(1)
        if not bool(given.any()):
            return
        arranged = arrange(batch, given, torch.zeros_like(given), config.start_id)
        present = arranged.given
        slots = torch.arange(1, present.shape[1] + 1, device=rows.device) * present
        mask = prefix_mask(present, config.prefix)
        model.use_adapter(self.mode)
        model.read(arranged.ids, arranged.positions, mask, _Step(self.layers, rows, slots, None))

    def states(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the states of the body rows that predict `positions`.

        Body rows before them that were not computed yet are computed first.
        """
        row, t, answers = self.pending(rows, positions, self.body)
        held, which, counts = row.unique_consecutive(return_inverse=True, return_counts=True)
        column = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[which]
        own = self.prefix[row] + self.body[row].cumsum(1).gather(1, t[:, None])[:, 0]  # its slot
        before = self.tokens[row, (t - 1).clamp(min=0)]
        start = self.model.config.start_id
        ids, places, slots = (
            torch.zeros(len(held), int(counts.max()), dtype=torch.int64, device=row.device)
            for _ in range(3)
        )
        ids[which, column] = before.masked_fill(t == 0, start)
        places[which, column], slots[which, column] = t, own
        width = int(own.max()) + 1
        key = torch.arange(width, device=row.device)
        # padding, in slot 0, reads itself alone
        mask = (key <= slots[..., None]) & ((key > 0) | (slots == 0)[..., None])
        self.model.use_adapter(self.mode)
        features = self.model.read(ids, places, mask, _Step(self.layers, held, slots, width))
        return features[which, column][answers]


class _Step:
    """What a network of `transformers` takes for its cache, during one pass.

    Args:
        layers: Keys and values of each layer.
        rows: (N,) sequence of each row of the pass.
        slots: (N, Q) where the pass writes.
        width: Slots to read, from the first. None: the pass reads only itself.
    """

    is_compileable = False

    def __init__(
        self, layers: Sequence[LayerMemory], rows: Tensor, slots: Tensor, width: int | None
    ) -> None:
        self.layers, self.rows, self.slots, self.width = layers, rows, slots, width
        first = int(rows[0])
        adjacent = rows.tolist() == list(range(first, first + len(rows)))
        self.held = slice(first, first + len(rows)) if adjacent else rows

    def update(
        self, k: Tensor, v: Tensor, layer: int, *others: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values (N, H, Q, D) of a layer, and return those to read."""
        width = self.width or int(self.slots.max()) + 1
        self.layers[layer].write(self.rows, self.slots, width, k, v)
        return (k, v) if self.width is None else self.layers[layer].read(self.held, self.width)

    def get_seq_length(self, layer: int = 0) -> int:
        """Return 0: positions and mask are always given, so no network counts what is cached."""
        return 0
