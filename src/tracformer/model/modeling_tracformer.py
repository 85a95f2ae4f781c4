"""Tracformer for `transformers`, in plain PyTorch, without the library `tracformer`.

This file is copied into model folders, where `AutoModel.from_pretrained(folder,
trust_remote_code=True)` finds it. It computes the dense definition: memory grows with the square of
the length, and nothing is cached. The library `tracformer` reads the same folder, in linear time.

- `TracformerHubConfig`: the fields of `config.json`.
- `TracformerHubModel`: final states of the positions.
- `TracformerHubForMaskedLM`: logits and loss; `infill` samples tokens for all masks.

Tensors are (B, T, ...): sequences, positions. Both encoders stack along the batch: rows 0..B-1 are
the prefix encoder, which looks back, and rows B..2B-1 the suffix encoder, which looks ahead.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput

IGNORED = -100  # label of a position without a loss


class TracformerHubConfig(PreTrainedConfig):  # type: ignore[misc]
    """Sizes and switches of a Tracformer; the mask follows the vocabulary."""

    model_type = "tracformer"
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "max_length",
        "initializer_range": "init_std",
    }
    vocab_size: int = 50257
    max_length: int = 1024
    modes: tuple[str, ...] = ("car", "ac", "ar")
    n_layer: int = 10
    n_head: int = 9
    d_model: int = 576
    n_max: int = 16
    dropout: float = 0.0
    encoder: str = "multiscope"
    decoder: str = "strided"
    key_set: str = "stepped"
    rotary_base: float = 10000.0
    init_std: float = 0.02
    columns: bool = False

    def get_text_config(self, *args: Any, **options: Any) -> "TracformerHubConfig":
        """Return this configuration: `encoder` and `decoder` are words, not configurations."""
        return self

    @property
    def mask_id(self) -> int:
        """The mask token's id."""
        return self.vocab_size


def encoder_mask(config: TracformerHubConfig, layer: int, distance: Tensor) -> Tensor:
    """Return which keys a query of encoder layer 1, 2, ... reads, by their distance behind it."""
    if config.encoder == "full":
        return distance >= 0
    farthest, n_max = 2 ** (layer - 1), config.n_max
    if farthest + (config.key_set == "rounded") <= n_max:
        return (distance >= 0) & (distance <= farthest)
    if config.key_set == "rounded":
        gaps = n_max - 1
        read = [(2 * i * farthest + gaps) // (2 * gaps) for i in range(n_max)]
    else:
        read = [*range(0, farthest + 1, farthest // (n_max - 1)), farthest]
    return torch.isin(distance, torch.tensor(read, device=distance.device))


def decoder_mask(config: TracformerHubConfig, layer: int, distance: Tensor) -> Tensor:
    """Return which keys a query of decoder layer 1, 2, ... reads, by their distance behind it."""
    strided = config.decoder == "strided" or (config.decoder == "neighbours" and layer == 1)
    stride = 2 ** (config.n_layer - layer + 1) if strided else 1
    return (distance >= 1) & ((distance - 1) % stride == 0)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return the attention of queries (B, Q, H, D) over keys (B, S, H, D) that a mask allows.

    The mask is (B, Q, S). A query without keys gets zeros.
    """
    scores = torch.einsum("bqhd,bshd->bhqs", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bhqs,bshd->bqhd", weights.masked_fill(~mask[:, None], 0.0), v)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (x_i, x_{i+D/2}) of x (B, T, H, D) by the angle of its position."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles  # (T, 1, D/2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class HubFeedForward(nn.Module):
    """Position-wise network d -> 4d -> d."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.up = nn.Linear(d, 4 * d)
        self.out = nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(gelu(self.up(x)))


class HubEncoderLayer(nn.Module):
    """Self-attention to a few distances, and a feed-forward network."""

    def __init__(self, config: TracformerHubConfig) -> None:
        super().__init__()
        d, self.n_head = config.d_model, config.n_head
        self.norm_attention = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)
        self.norm_feedforward = nn.LayerNorm(d)
        self.feedforward = HubFeedForward(d)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        heads = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.n_head, -1))
        q, k, v = heads.unbind(-3)  # (2B, T, H, D)
        mixed = attend(rotate(q, angles), rotate(k, angles), v, mask)
        x = x + self.dropout(self.out(mixed.flatten(-2)))
        return x + self.dropout(self.feedforward(self.norm_feedforward(x)))


class HubDecoderLayer(nn.Module):
    """Cross-attention to the features of one encoder layer, and a feed-forward network."""

    def __init__(self, config: TracformerHubConfig) -> None:
        super().__init__()
        d, self.n_head = config.d_model, config.n_head
        self.norm_query, self.norm_feature = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.out = nn.Linear(d, d)
        self.norm_feedforward = nn.LayerNorm(d)
        self.feedforward = HubFeedForward(d)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        feature: Tensor,
        angles: tuple[Tensor, Tensor],
        columns: Tensor,
        mask: Tensor,
    ) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (self.n_head, -1))

        cos, sin = angles
        feature = self.norm_feature(feature)  # (1 or 2 times B, T, d)
        q = rotate(heads(self.q(self.norm_query(x))), (cos[columns], sin[columns]))
        k, v = rotate(heads(self.k(feature)), angles), heads(self.v(feature))
        # One softmax over prefix and suffix: suffix keys follow the prefix keys.
        k, v = (torch.cat(y.split(len(x)), dim=1) for y in (k, v))
        x = x + self.dropout(self.out(attend(q, k, v, mask).flatten(-2)))
        return x + self.dropout(self.feedforward(self.norm_feedforward(x)))


class HubColumns(nn.Module):
    """Embeddings, output matrix and bias of each column of an alignment."""

    def __init__(self, config: TracformerHubConfig) -> None:
        super().__init__()
        self.size = (config.max_length, config.vocab_size)
        self.letters = nn.Embedding(config.max_length * (config.vocab_size + 1), config.d_model)
        self.queries = nn.Embedding(config.max_length, config.d_model)
        self.head = nn.Parameter(torch.zeros(config.max_length * config.vocab_size, config.d_model))
        self.bias = nn.Parameter(torch.zeros(config.max_length * config.vocab_size))

    def logits(self, states: Tensor, columns: Tensor) -> Tensor:
        """Return the columns' part of the logits (B, Q, V) of states (B, Q, d) at (Q,)."""
        head, bias = self.head.unflatten(0, self.size), self.bias.unflatten(0, self.size)
        return torch.einsum("bqd,qvd->bqv", states, head[columns]) + bias[columns]


class TracformerHubBase(PreTrainedModel):  # type: ignore[misc]
    """The network, without a head."""

    config_class = TracformerHubConfig
    base_model_prefix = ""
    main_input_name = "input_ids"

    def __init__(self, config: TracformerHubConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size + 1, config.d_model)  # last row: the mask
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = nn.ModuleList(HubEncoderLayer(config) for _ in range(config.n_layer))
        self.decoder = nn.ModuleList(HubDecoderLayer(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.d_model)
        if config.columns:
            self.columns = HubColumns(config)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """Load a folder or an id of the hub; a missing or unexpected tensor is an error."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **options)
        if wrong := [*info["missing_keys"], *info["unexpected_keys"]]:
            raise ValueError(f"the weights do not fit the configuration: {sorted(wrong)[0]}")
        return (model, info) if output_loading_info else model

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        return self.embedding

    def get_output_embeddings(self) -> None:
        """Return None: the head is the input embedding without the mask."""

    def states(
        self, tokens: Tensor, given: Tensor, lengths: Tensor, mode: str, columns: Tensor
    ) -> Tensor:
        """Return the final states (B, Q, d) of some positions.

        Args:
            tokens: (B, T) ids. Modes `car` and `ar` read the tokens before a position.
            given: (B, T) bool, True where a token is given.
            lengths: (B,) lengths; what follows is padding.
            mode: `car`, `ac` or `ar`.
            columns: (Q,) the positions.
        """
        config, (B, T) = self.config, tokens.shape
        t = torch.arange(T, device=tokens.device)
        distance = t[:, None] - t  # (T, T) of a key behind a query
        inside = (t < lengths[:, None])[:, None]  # (B, 1, T)
        i = torch.arange(0, config.d_model // config.n_head, 2, device=t.device).double()
        angle = t[:, None, None] * config.rotary_base ** (-i * config.n_head / config.d_model)
        angles = (angle.cos().to(self.dtype), angle.sin().to(self.dtype))

        tokens = tokens.masked_fill(~inside[:, 0], config.mask_id)
        known = tokens.masked_fill(~given, config.mask_id)
        readings = {"car": [tokens, known], "ac": [known, known], "ar": [tokens]}[mode]
        directions = [distance, -distance][: len(readings)]
        x, features = self.embedding(torch.cat(readings)), []
        if config.columns:
            x = x + self.columns.letters(t * (config.vocab_size + 1) + torch.cat(readings))
        x = self.dropout(x)
        for number, layer in enumerate(self.encoder, start=1):
            mask = [encoder_mask(config, number, each) & inside for each in directions]
            x = layer(x, angles, torch.cat(mask))
            features.append(x)

        x = x.new_zeros(B, len(columns), config.d_model)
        x = x + self.columns.queries(columns) if config.columns else x
        for number, layer in enumerate(self.decoder, start=1):
            mask = [decoder_mask(config, number, each[columns]) & inside for each in directions]
            x = layer(x, features[-number], angles, columns, torch.cat(mask, dim=2))
        return self.norm(x)

    def check(
        self, input_ids: Tensor, attention_mask: Tensor | None, mode: str | None, preferred: str
    ) -> tuple[Tensor, str]:
        """Return which positions are no padding (B, T), and the mode.

        Without a mode, it is the first of the comma-separated `preferred` that was trained.
        """
        modes, longest = self.config.modes, self.config.max_length
        mode = mode or next(each for each in preferred.split(",") if each in modes)
        if mode not in modes:
            raise ValueError(f"mode is {mode!r}; trained modes: {', '.join(modes)}")
        if input_ids.dim() != 2 or not 1 <= input_ids.shape[1] <= longest:
            raise ValueError(
                f"input_ids has shape {tuple(input_ids.shape)}; it must be (B, T) with T in "
                f"1..{longest}"
            )
        if self.config.columns and input_ids.shape[1] < longest:
            raise ValueError(
                f"input_ids has {input_ids.shape[1]} tokens a row; this model reads rows of an "
                f"alignment, which all have {longest}"
            )
        inside = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        inside = inside.bool()
        if (inside[:, 1:] & ~inside[:, :-1]).any() or not inside[:, 0].all():
            raise ValueError("padding must be on the right: set tokenizer.padding_side = 'right'")
        return inside, mode

    def read(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        labels: Tensor | None,
        mode: str | None,
        context: Tensor | None,
    ) -> tuple[tuple[Tensor, Tensor, Tensor, str], Tensor]:
        """Return the first arguments of `states`, and which positions can be answered (B, T)."""
        inside, mode = self.check(input_ids, attention_mask, mode, "ac,car,ar")
        masked = (input_ids == self.config.mask_id) & inside
        given = ~masked if context is None else context.bool()
        if (given & masked).any():
            raise ValueError("context gives a position that holds the mask")
        tokens = input_ids
        if labels is not None:
            if ((labels != IGNORED) & (given | ~inside)).any():
                raise ValueError(f"labels must be {IGNORED} at given positions and in the padding")
            tokens = torch.where(labels != IGNORED, labels, input_ids)
        answered = inside
        if mode != "ac":  # a token after one that is not known cannot be predicted
            unknown = (tokens == self.config.mask_id) & inside
            answered = inside & (unknown.cumsum(1) - unknown.long() == 0)
            if (~given & inside & ~answered).any():
                raise ValueError(
                    f"mode {mode!r} predicts a token from the true text before it: give labels "
                    "for all masks, use mode 'ac', or call infill"
                )
        return (tokens, given, inside.sum(1), mode), answered


class TracformerHubModel(TracformerHubBase):
    """Tracformer without a head: a state (B, T, d) for each position, given the others."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        mode: str | None = None,
        context: Tensor | None = None,
        **options: Any,
    ) -> BaseModelOutput:
        """Return the final states; see `TracformerHubForMaskedLM.forward`."""
        inputs, answered = self.read(input_ids, attention_mask, None, mode, context)
        columns = torch.arange(input_ids.shape[1], device=input_ids.device)
        states = self.states(*inputs, columns)
        return BaseModelOutput(last_hidden_state=states * answered[..., None])


class HubFill(NamedTuple):
    """Filled sequences, and the log-probability of each fill given the rest."""

    sequences: Tensor  # (B, T)
    log_probs: Tensor  # (B,)


class TracformerHubForMaskedLM(TracformerHubBase):
    """Tracformer as a masked language model; logits have no column for the mask."""

    def logits(self, states: Tensor, columns: Tensor) -> Tensor:
        """Return logits (B, Q, vocab_size) of final states (B, Q, d) at positions (Q,)."""
        logits = states @ self.embedding.weight[: self.config.vocab_size].T
        if self.config.columns:
            logits = logits + self.columns.logits(states, columns)
        return logits

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        mode: str | None = None,
        context: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **options: Any,
    ) -> MaskedLMOutput:
        """Return logits, and with labels the mean of -log p over them.

        Args:
            input_ids: (B, T) ids, the mask where a token is to be predicted.
            attention_mask: (B, T), zero in the padding, which must be on the right.
            labels: (B, T) true tokens at masked positions, -100 elsewhere.
            mode: `ac` (each mask from the given tokens), `car` (also from all tokens before it) or
                `ar` (from those alone); by default the first one that was trained.
            context: (B, T) bool, True where given; by default all that is not masked.
            num_items_in_batch: Divisor of the loss, which Trainer passes.
            options: Other arguments of transformers' models, which have no effect.
        """
        inputs, answered = self.read(input_ids, attention_mask, labels, mode, context)
        columns = torch.arange(input_ids.shape[1], device=input_ids.device)
        logits = self.logits(self.states(*inputs, columns), columns) * answered[..., None]
        loss = None
        if labels is not None:
            total = cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
            loss = total / torch.as_tensor(count, device=total.device).clamp(min=1)
        return MaskedLMOutput(loss=loss, logits=logits)

    @torch.no_grad()
    def infill(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        mode: str | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        forbidden: Sequence[int | None] = (),
        generator: torch.Generator | None = None,
    ) -> HubFill:
        """Sample a token for every mask, from left to right.

        Args:
            input_ids: (B, T) ids with masks.
            attention_mask: (B, T), zero in the padding.
            mode: `car` by default, if it was trained: log_probs are then exact joints. In `ac` each
                sampled token is given to the following ones.
            temperature: Below 1 sharpens the distribution; 0 takes the most likely token.
            top_p: Sample from the most likely tokens with this total probability.
            forbidden: Ids that are never sampled, such as `tokenizer.eos_token_id`.
            generator: Source of random numbers.
        """
        if temperature < 0 or not 0 < top_p <= 1:
            raise ValueError(
                f"temperature is {temperature} and top_p {top_p}; temperature must be at least 0 "
                "and top_p in (0, 1]"
            )
        inside, mode = self.check(input_ids, attention_mask, mode, "car,ac,ar")
        tokens, lengths = input_ids.clone(), inside.sum(1)
        masked = (tokens == self.config.mask_id) & inside
        total = torch.zeros(len(tokens), device=tokens.device)
        banned = [i for i in forbidden if i is not None]
        for t in masked.any(0).nonzero()[:, 0]:
            known = tokens != self.config.mask_id if mode == "ac" else ~masked
            states = self.states(tokens, known, lengths, mode, t[None])
            log_p = self.logits(states, t[None])[:, 0].float().log_softmax(-1)
            chosen = _sample(log_p, temperature, top_p, banned, generator)
            tokens[:, t] = torch.where(masked[:, t], chosen, tokens[:, t])
            total += log_p.gather(1, chosen[:, None])[:, 0] * masked[:, t]
        return HubFill(tokens, total)


def _sample(
    log_p: Tensor,
    temperature: float,
    top_p: float,
    banned: list[int],
    generator: torch.Generator | None,
) -> Tensor:
    """Return one token id (B,) of each row of log-probabilities (B, V)."""
    log_p = log_p.clone()
    log_p[:, banned] = -torch.inf
    if temperature == 0:
        return log_p.argmax(-1)
    p, order = (log_p / temperature).softmax(-1).sort(descending=True)
    p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0.0)  # keeps the most likely one
    return order.gather(1, torch.multinomial(p, 1, generator=generator))[:, 0]
