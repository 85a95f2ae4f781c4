"""From a configuration to a running loop: whatever the user left open is chosen
here, and said aloud.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

from tracformer.baselines import find_family, load_model
from tracformer.data import (
    PreparedData,
    Tokenizer,
    is_made_from,
    load_tokenizer,
    name_of,
    open_examples,
    open_sources,
    parse_validation,
    prepare,
    require_same_tokenizer,
    require_tokenizer,
)
from tracformer.data.shards import MANIFEST_FILE
from tracformer.data.sources import fixed_part
from tracformer.distributed import Ranks, join_ranks
from tracformer.files import held, write_atomically
from tracformer.loading import find_folder, tokenizer_of
from tracformer.model import ConditionalModel, ModelConfig, Tracformer, TracformerConfig
from tracformer.training.checkpoint import list_checkpoints
from tracformer.training.loop import Outcome, Trainer
from tracformer.training.train_config import DataConfig, TrainConfig

SMALL = 1_000_000  # tokens below which the tiny model is plenty
EPOCHS = 20  # passes over small data
MOST_STEPS, LEAST_STEPS = 5000, 200
FREE = ("dropout", "modes")  # of a model that `init` brings, what a run may still change

Say = Callable[[str], None]


def start(config: TrainConfig, under_preset: Callable[[str], TrainConfig] | None = None) -> Outcome:
    """Train as configured.

    `under_preset`, where the user named no preset, gives the same wishes under the one that fits
    the data.
    """
    if not config.data.source:
        raise ValueError(
            "no data: write data=FILE (text, JSONL, FASTA), data=FOLDER (prepared), or the name of "
            "a data set"
        )
    # that there is none is told before anything is written
    origin = _origin(config.init) if config.init else None
    if origin is not None:
        _require_unchanged(config, origin)
        config = dataclasses.replace(
            config,
            model={**config.model, "family": origin.model.config.model_type},
            init=str(origin.folder),
        )
    with join_ranks(config.device) as ranks:
        say: Say = _tell if ranks.first else lambda text: None
        config = dataclasses.replace(config, run=config.run or default_run(config))
        data = _open_data(config, origin, ranks, say)
        if under_preset is not None and origin is None:
            config = dataclasses.replace(under_preset(fitting_preset(data, say)), run=config.run)
        model = _build_model(config, origin, data.tokenizer, say)
        config = dataclasses.replace(config, length=config.length or model.config.max_length)
        if config.length > model.config.max_length:
            raise ValueError(
                f"length is {config.length}, but the model takes at most max_length = "
                f"{model.config.max_length} tokens"
            )
        if config.batch % ranks.world:
            raise ValueError(
                f"batch is {config.batch} for {ranks.world} ranks; it must be a multiple of their "
                "number"
            )
        views = (config.length, config.data.rows, config.data.cross_documents)
        train = open_examples(data.split("train"), *views)
        validated = _can_validate(data, config)
        valid = open_examples(data.split("validation"), *views) if validated else None
        if valid is None:
            say("no validation: there is less held-out text than one row")
        if not config.steps:
            config = dataclasses.replace(
                config, steps=min(MOST_STEPS, max(LEAST_STEPS, EPOCHS * len(train) // config.batch))
            )
        if (warmup := config.optimizer.warmup) >= config.steps:
            config = dataclasses.replace(
                config, optimizer=dataclasses.replace(config.optimizer, warmup=config.steps // 10)
            )
            say(
                f"optimizer.warmup is {warmup}, and there are {config.steps} steps: warming up "
                f"over {config.optimizer.warmup} of them"
            )
        _describe(config, model, data, len(train), ranks, say)
        trainer = Trainer(
            config, model, data.tokenizer, train, valid, ranks, data.manifest.fingerprint
        )
        with _alone_in(Path(config.run)) if ranks.first else nullcontext():
            trainer.resume()
            if trainer.state.step > config.steps:
                raise ValueError(
                    f"steps is {config.steps}, and {config.run} has done {trainer.state.step} "
                    "already; ask for more steps"
                )
            if ranks.first:
                write_atomically(
                    Path(config.run) / "train.json", json.dumps(config.to_dict(), indent=1) + "\n"
                )
            return trainer.train()


class Origin(NamedTuple):
    """The trained model that a run starts from."""

    folder: Path
    model: ConditionalModel
    tokenizer: str  # where it is


def _origin(init: str) -> Origin:
    """Whatever `tracformer.load` takes: a model's folder, a run's, a bundled name,
    an id of the hub.
    """
    folder = find_folder(init)
    model = load_model(folder)
    return Origin(folder, model, str(tokenizer_of(folder, model)))


def _require_unchanged(config: TrainConfig, origin: Origin) -> None:
    """Every wish about the model is what it is already, or may still change."""
    fixed = {"family": origin.model.config.model_type, **origin.model.config.to_dict()}
    for key in fixed:  # the family first: another one has other keys
        if key not in FREE and config.model.get(key, fixed[key]) != fixed[key]:
            raise ValueError(
                f"model.{key} is {config.model[key]!r}, but init={config.init} fixes it at "
                f"{fixed[key]!r}; leave it out"
            )


def default_run(config: TrainConfig) -> str:
    """runs/NAME after the data: `my.txt` trains in runs/my, and so does `my/*.txt`."""
    name = fixed_part(config.data.source.rstrip("/").split(":")[-1]).name
    written = name.encode(errors="ignore").decode()  # TensorBoard takes no name that is not UTF-8
    return str(Path("runs") / (written.split(".")[0] or "run"))


def _tell(text: str) -> None:
    """A file's name may be no UTF-8."""
    print(text.encode(errors="backslashreplace").decode())


@contextmanager
def _alone_in(run: Path) -> Iterator[None]:
    """Two runs in one folder would spoil each other's checkpoints."""
    with ExitStack() as stack:
        try:
            stack.enter_context(held(run))
        except BlockingIOError:
            raise ValueError(
                f"another process is training in {run}; wait until it ends, or use another "
                "run=FOLDER"
            ) from None
        yield


def fitting_preset(data: PreparedData, say: Say) -> str:
    """The tiny or the laptop preset, by the number of tokens."""
    tokens = data.manifest.splits["train"].tokens
    name = "tiny" if tokens < SMALL else "laptop"
    say(f"preset: {name} ({tokens:,} training tokens); `tracformer train --presets` lists others")
    return name


def _open_data(config: TrainConfig, origin: Origin | None, ranks: Ranks, say: Say) -> PreparedData:
    """A prepared folder as it is; anything else is prepared once, inside the run's folder."""
    if (Path(config.data.source) / MANIFEST_FILE).is_file():
        if config.data.validation != DataConfig.validation:
            raise ValueError(
                f"data.validation is {config.data.validation!r}, but the splits of "
                f"{config.data.source} were made when it was prepared; "
                f"use `tracformer prepare --validation {config.data.validation}`, or leave "
                "data.validation out"
            )
        data = PreparedData.open(config.data.source)
    else:
        fraction, held = parse_validation(config.data.validation)
        sources = open_sources(config.data.source, validation=held)
        folder = Path(config.run) / "data"
        tokenizer = config.data.tokenizer
        if origin is not None and tokenizer == "auto":
            tokenizer = origin.tokenizer
        found = (folder / MANIFEST_FILE).is_file()
        if ranks.first and not found:
            say(f"preparing {config.data.source} in {folder}")
            prepare(folder, sources, tokenizer, validation=fraction)
        ranks.barrier()
        data = PreparedData.open(folder)
        if not is_made_from(data, sources, hashes=ranks.first and found):
            told = config.data.source + (f" with data.validation={held}" if held else "")
            raise ValueError(
                f"{folder} was prepared from other data than {told}; use another run=FOLDER, or "
                f"remove {folder}"
            )
        carved = data.manifest.carving["train"].get("fraction", 0.0)
        if "validation" not in sources and carved != fraction:
            raise ValueError(
                f"{folder} holds back {carved:g} of the data, and data.validation is now "
                f"{fraction:g}; "
                f"use another run=FOLDER, or remove {folder}"
            )
    require_tokenizer(config.data.tokenizer, data, "data.tokenizer")
    counts = ", ".join(
        f"{name} {split.tokens:,} tokens in {split.documents:,} documents"
        for name, split in data.manifest.splits.items()
    )
    say(
        f"data: {data.folder}: {counts}; tokeniser: {name_of(data.tokenizer)}, "
        f"{data.tokenizer.vocab_size} tokens"
    )
    return data


def _build_model(
    config: TrainConfig, origin: Origin | None, tokenizer: Tokenizer, say: Say
) -> ConditionalModel:
    torch.manual_seed(config.seed)
    if origin is None:
        return _construct(config.model_config(tokenizer.vocab_size), config)
    old, old_tokenizer = origin.model, load_tokenizer(origin.tokenizer)
    free = {
        "modes": config.modes(type(old.config)),
        **{key: config.model[key] for key in FREE if key in config.model},
    }
    shape = {**old.config.to_dict(), "vocab_size": tokenizer.vocab_size, **free}
    known = {token: i for i, token in enumerate(old_tokenizer.tokens())}
    if tokenizer.fingerprint == old_tokenizer.fingerprint:
        origins = list(range(tokenizer.vocab_size))
    elif known.keys() <= set(tokenizer.tokens()):
        origins = [known.get(token, -1) for token in tokenizer.tokens()]
        say(f"vocabulary grown from {old.config.vocab_size} to {tokenizer.vocab_size} tokens")
    else:
        require_same_tokenizer(tokenizer, old_tokenizer)
    model = _construct(type(old.config).from_dict(shape), config)
    model.load_state_dict(grown_weights(old, origins))
    say(f"starting from {config.init}")
    return model


def _construct(shape: ModelConfig, config: TrainConfig) -> ConditionalModel:
    if isinstance(shape, TracformerConfig):
        return Tracformer(shape, config.attention)
    return find_family(shape.model_type).model_class(shape)


def grown_weights(old: ConditionalModel, origins: list[int]) -> dict[str, torch.Tensor]:
    """The old weights under another vocabulary: row i is old row `origins[i]`, or the old rows'
    mean for -1; the mask stays last.
    """
    weights = old.state_dict()
    if origins == list(range(old.config.vocab_size)):
        return weights
    if not isinstance(old.config, TracformerConfig):
        raise ValueError(
            "the vocabulary is not that of init, and only a Tracformer's can grow; "
            f"{old.config.model_type} needs the same"
        )
    rows, mask = weights["embedding.weight"][:-1], weights["embedding.weight"][-1:]
    candidates = torch.cat((rows, rows.mean(0, keepdim=True)))  # -1 picks the mean
    return {**weights, "embedding.weight": torch.cat((candidates[origins], mask))}


def _can_validate(data: PreparedData, config: TrainConfig) -> bool:
    if "validation" not in data.manifest.splits:
        return False
    packed = config.data.rows == "packed" and config.data.cross_documents
    return not packed or data.manifest.splits["validation"].tokens >= config.length


def _describe(
    config: TrainConfig,
    model: ConditionalModel,
    data: PreparedData,
    rows: int,
    ranks: Ranks,
    say: Say,
) -> None:
    shape = model.config
    say(
        f"model: {shape.model_type}, {model.num_parameters() / 1e6:.1f}M parameters, "
        f"{model.num_parameters(embeddings=False) / 1e6:.1f}M without embeddings, "
        f"modes {', '.join(shape.modes)}; objective {config.objective}"
    )
    passes = config.steps * config.batch / rows
    say(
        f"run: {config.run}: {config.steps} steps of {config.batch} x {config.length} tokens "
        f"({passes:.1f} passes over the data) "
        f"on {ranks.world} x {ranks.device.type}"
    )
    if list_checkpoints(Path(config.run) / "checkpoints"):
        say(
            f"{config.run} has checkpoints: going on from the newest whole one (use another "
            "run=FOLDER to start afresh)"
        )
