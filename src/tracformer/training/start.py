"""Start a training run: resolve the configuration, prepare the data, build the model, train.

`resolve` fills in everything that the user left open and returns the final configuration. `start`
then builds the model and runs the training loop of `tracformer.training.loop`.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tracformer.baselines import CAUSAL_LM, is_foreign, load_model
from tracformer.baselines.causal_lm import CausalLM, CausalLMConfig
from tracformer.data import (
    Examples,
    PreparedData,
    Tokenizer,
    is_made_from,
    load_tokenizer,
    name_of,
    open_examples,
    open_sources,
    parse_validation,
    require_same_tokenizer,
    require_tokenizer,
)
from tracformer.data.input_files import fixed_part
from tracformer.data.prepare import prepare
from tracformer.data.shards import MANIFEST_FILE
from tracformer.devices import Ranks, join_ranks, use_threads
from tracformer.files import lock_folder, write_atomically
from tracformer.loading import PLACES, find_folder, read_causal_lm, tokenizer_of
from tracformer.model import ConditionalModel, ModelConfig, TracformerConfig
from tracformer.model.storage import load_document
from tracformer.proteins.wild_type import save_profile
from tracformer.training import summary
from tracformer.training.checkpoint import list_checkpoints
from tracformer.training.clock import Clock
from tracformer.training.loop import Trainer, TrainingOutcome
from tracformer.training.objectives import parse_objective
from tracformer.training.plan import fresh_model, make_plan, start_columns, with_columns
from tracformer.training.summary import Yardstick, fit_yardstick
from tracformer.training.train_config import DataConfig, TrainConfig, from_dict

PLANNED = "train.json"  # the final configuration, in the run's folder
SMALL_DATA = 1_000_000  # tokens; below it, the preset `tiny` is used
EPOCHS = 20  # passes over small data
MOST_STEPS, LEAST_STEPS = 5000, 200

Say = Callable[[str], None]


class InitialModel(NamedTuple):
    """The trained model that a run starts from."""

    folder: Path
    model: ConditionalModel
    tokenizer: str  # path of its tokenizer


def start(
    config: TrainConfig,
    base: Callable[[str | Mapping[str, Any]], TrainConfig] | None = None,
    began: float | None = None,
    verify: bool = True,
) -> TrainingOutcome:
    """Train as configured.

    Args:
        config: Configuration; `data.source` is required, the rest has defaults.
        base: Returns the configuration with a preset, or with nested values, as its base. Given if
            the user named no preset: the preset is then chosen by the size of the data, and size,
            rows and batch of a run with a budget by `tracformer.training.plan`.
        began: `time.monotonic()` from which a budget of minutes counts; None: now.
        verify: Check the files of `init` against its `checksums.json`.

    Returns:
        The run folder, the last step, and the signal that stopped the run, if one did.

    Raises:
        ValueError: The configuration does not fit the data, the model or the checkpoints.
        TrainingError: Training cannot continue.

    Example:
        Train a tiny model on a text file, for two steps::

            from tracformer.training.train_config import load_config

            config = load_config(["data=my.txt", "steps=2", "run=runs/my"], "tiny")
            tracformer.train(config)
    """
    if not config.data.source:
        raise ValueError(
            "no training data: write data=FILE (text, JSONL, FASTA), data=FOLDER (prepared), or "
            "data=NAME (a named data set)"
        )
    clock = Clock(60.0 * config.minutes if config.minutes else math.inf, began)
    # Loaded before anything is written, so that a wrong `init` leaves no files behind.
    initial = _load_initial(config, verify) if config.init else None
    if initial is not None:
        _reject_other_model(config, initial)
    elif config.model.get("family") == CAUSAL_LM:
        raise ValueError(
            f"model.family is {CAUSAL_LM!r}, which starts from a language model of transformers: "
            "add init=MODEL, or use `tracformer adapt`"
        )
    with join_ranks(config.device) as ranks:
        say: Say = _print if ranks.first else lambda text: None
        if ranks.device.type == "cpu" and (busy := use_threads(config.threads)):
            say(busy)
        run = config.run or default_run(config)
        data = _open_data(config, Path(run), initial, ranks, say)
        config = config if initial else with_columns(config, data)
        config = _planned(config, base, Path(run), data, initial, clock, ranks, say)
        config = resolve(config, run, data, initial, ranks, say)
        if config.threads:  # of the plan
            use_threads(config.threads)
        model = _build_model(config, initial, data.tokenizer, say)
        train, valid = _rows(config, data, "train"), None
        if initial is None:
            start_columns(model, train)
        if _can_validate(data, config):
            valid = _rows(config, data, "validation")
        else:
            say("no validation: the held-out text is shorter than one row")
        yardstick = fit_yardstick(data, train) if clock.limited and valid is not None else None
        _describe(config, model, train, clock, ranks, say)
        trainer = Trainer(
            config, model, data.tokenizer, train, valid, ranks, data.manifest.fingerprint, clock
        )
        with _locked(Path(run)) if ranks.first else nullcontext():
            trainer.resume()
            if config.steps and trainer.state.step > config.steps:
                raise ValueError(
                    f"steps is {config.steps}, but {run} has already done {trainer.state.step} "
                    "steps; set steps to a larger number"
                )
            if ranks.first:
                write_atomically(Path(run) / PLANNED, json.dumps(config.to_dict(), indent=1) + "\n")
            outcome = trainer.train()
            if outcome.finished and ranks.first and getattr(model.config, "columns", False):
                folders = [Path(run) / place for place in PLACES if (Path(run) / place).is_dir()]
                say(save_profile(train, data.tokenizer, folders))
            if clock.limited and outcome.finished and ranks.first:
                _conclude(config, trainer, valid, yardstick, data, say)
            return outcome


def _planned(
    config: TrainConfig,
    base: Callable[[str | Mapping[str, Any]], TrainConfig] | None,
    run: Path,
    data: PreparedData,
    initial: InitialModel | None,
    clock: Clock,
    ranks: Ranks,
    say: Say,
) -> TrainConfig:
    """Return the configuration with a preset, or with the plan of a run that has a budget."""
    if not clock.limited:
        if base is not None and initial is None:
            config = base(fitting_preset(data, say))
        return config
    if list_checkpoints(run / "checkpoints") and (run / PLANNED).is_file():
        stored = json.loads((run / PLANNED).read_text())
        if stored.get("minutes"):  # continue with the plan that was made at the start
            stored["minutes"] = config.minutes
            return from_dict(stored) if base is None else base(stored)
    if initial is not None:
        config = dataclasses.replace(
            config, model={**config.model, "family": initial.model.config.model_type}
        )

    def build(config: TrainConfig) -> ConditionalModel:
        if initial is None:
            return fresh_model(config, config.model_config(data.tokenizer.vocab_size))
        return type(initial.model)(_model_config(config, initial, data.tokenizer))

    fixed = initial.model.config if initial is not None else None
    config = make_plan(config, base, build, data, clock, ranks, fixed)
    if config.optimizer.schedule != "wsd":
        raise ValueError(
            f"optimizer.schedule is {config.optimizer.schedule!r}, and minutes needs wsd, whose "
            "decay begins when the time requires it; leave the schedule out, or give steps"
        )
    return config


def _conclude(
    config: TrainConfig,
    trainer: Trainer,
    valid: Examples | None,
    yardstick: Yardstick | None,
    data: PreparedData,
    say: Say,
) -> None:
    """Write the realised plan and the summary of a run with a budget, and print the summary."""
    run, clock, state = Path(config.run), trainer.clock, trainer.state
    summary.write_plan(run, config, clock, state.step, data.folder)
    shown = valid if valid is not None else trainer.stream.rows
    facts: dict[str, Any] = {"example": summary.example_of(data.tokenizer, shown)}
    if valid is not None and yardstick is not None and trainer.ranks.world == 1:
        with state.averaged_weights():
            facts |= summary.held_out_figures(
                trainer.model, data.tokenizer, valid, yardstick, config.eval_sequences
            )
    facts |= {key: trainer.describe_training()[key] for key in ("step", "tokens", "seconds")}
    facts |= {
        "budget_seconds": round(60 * config.minutes, 1),
        "decays": ",".join(map(str, clock.decays)),
        "threads": torch.get_num_threads(),
    }
    for line in summary.write_summary(run, facts):
        say(line)


def resolve(
    config: TrainConfig,
    run: str,
    data: PreparedData,
    initial: InitialModel | None,
    ranks: Ranks,
    say: Say,
) -> TrainConfig:
    """Return the final configuration, with everything filled in that was left open.

    This covers `run`, `init`, the model's family, `length`, `steps` and a warm-up that is longer
    than the run.

    Args:
        config: What the user and the preset said.
        run: Folder of the run.
        data: The prepared training data.
        initial: The model to start from, if any.
        ranks: Ranks that share the batch.
        say: Prints a line for the user.
    """
    if initial is not None:
        model = {**config.model, "family": initial.model.config.model_type}
        # A known family fixes the default objective, which the modes below depend on.
        config = dataclasses.replace(config, model=model, init=str(initial.folder))
    longest = _model_config(config, initial, data.tokenizer).max_length
    length = config.length or longest
    if length > longest:
        raise ValueError(
            f"length is {length}, but the model has max_length {longest}; use length={longest} or "
            "less"
        )
    if config.batch % ranks.world:
        raise ValueError(
            f"batch is {config.batch}; it must be a multiple of the number of ranks, {ranks.world}"
        )
    steps = config.steps
    if not steps and not config.minutes:
        rows = len(_rows(dataclasses.replace(config, length=length), data, "train"))
        steps = min(MOST_STEPS, max(LEAST_STEPS, EPOCHS * rows // config.batch))
    optimizer = config.optimizer
    if steps and optimizer.warmup >= steps:
        optimizer = dataclasses.replace(optimizer, warmup=steps // 10)
        say(
            f"optimizer.warmup is {config.optimizer.warmup}, but the run has {steps} steps: "
            f"using {optimizer.warmup} warm-up steps"
        )
    return dataclasses.replace(config, run=run, length=length, steps=steps, optimizer=optimizer)


def _load_initial(config: TrainConfig, verify: bool) -> InitialModel:
    """Load a model by anything that `tracformer.load` accepts."""
    folder = find_folder(config.init)
    document = load_document(folder)
    causal = document.get("model_type") == CAUSAL_LM or is_foreign(document)
    model: ConditionalModel
    if causal or config.model.get("family") == CAUSAL_LM:
        model, folder = read_causal_lm(config.init, verify)
    else:
        model = load_model(folder, verify=verify)
    return InitialModel(folder, model, str(tokenizer_of(folder, model)))


def _reject_other_model(config: TrainConfig, initial: InitialModel) -> None:
    """Reject model options that conflict with `init`."""
    fixed = {"family": initial.model.config.model_type, **initial.model.config.to_dict()}
    for key in fixed:  # the family first: another family has other keys
        if (
            key not in initial.model.config.changeable
            and config.model.get(key, fixed[key]) != fixed[key]
        ):
            raise ValueError(
                f"model.{key} is {config.model[key]!r}, but init={config.init} fixes it at "
                f"{fixed[key]!r}; leave it out"
            )


def default_run(config: TrainConfig) -> str:
    """Return runs/NAME with the name of the data: `my.txt` and `my/*.txt` train in runs/my."""
    name = fixed_part(config.data.source.rstrip("/").split(":")[-1]).name
    written = name.encode(errors="ignore").decode()  # TensorBoard accepts only UTF-8 names
    return str(Path("runs") / (written.split(".")[0] or "run"))


def _print(text: str) -> None:
    """Print a line; file names that are not UTF-8 are escaped."""
    print(text.encode(errors="backslashreplace").decode())


@contextmanager
def _locked(run: Path) -> Iterator[None]:
    """Hold the run's lock: two processes in one folder would damage each other's checkpoints."""
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_folder(run))
        except BlockingIOError:
            raise ValueError(
                f"another process is training in {run}; wait until it ends, or use another "
                "run=FOLDER"
            ) from None
        yield


def fitting_preset(data: PreparedData, say: Say) -> str:
    """Return the preset `tiny` or `laptop`, by the number of training tokens."""
    tokens = data.manifest.splits["train"].tokens
    name = "tiny" if tokens < SMALL_DATA else "laptop"
    say(f"preset: {name} ({tokens:,} training tokens); `tracformer train --presets` lists others")
    return name


def _open_data(
    config: TrainConfig, run: Path, initial: InitialModel | None, ranks: Ranks, say: Say
) -> PreparedData:
    """Open a prepared folder; other data is prepared once, in the run's folder."""
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
        fraction, files = parse_validation(config.data.validation)
        sources = open_sources(config.data.source, validation=files)
        folder = run / "data"
        tokenizer = config.data.tokenizer
        if initial is not None and tokenizer == "auto":
            tokenizer = initial.tokenizer
        found = (folder / MANIFEST_FILE).is_file()
        if ranks.first and not found:
            say(f"preparing {config.data.source} in {folder}")
            prepare(folder, sources, tokenizer, validation=fraction)
        ranks.barrier()
        data = PreparedData.open(folder)
        if not is_made_from(data, sources, hashes=ranks.first and found):
            given = config.data.source + (f" with data.validation={files}" if files else "")
            raise ValueError(
                f"{folder} was prepared from other data than {given}; use another run=FOLDER, or "
                f"remove {folder}"
            )
        carved = data.manifest.carving["train"].get("fraction", 0.0)
        if "validation" not in sources and carved != fraction:
            raise ValueError(
                f"{folder} holds out {carved:g} of the data, but data.validation is now "
                f"{fraction:g}; use another run=FOLDER, or remove {folder}"
            )
    require_tokenizer(config.data.tokenizer, data, "data.tokenizer")
    counts = ", ".join(
        f"{name} {split.tokens:,} tokens in {split.documents:,} documents"
        for name, split in data.manifest.splits.items()
    )
    say(
        f"data: {data.folder}: {counts}; tokenizer: {name_of(data.tokenizer)}, "
        f"{data.tokenizer.vocab_size} tokens"
    )
    return data


def _rows(config: TrainConfig, data: PreparedData, split: str) -> Examples:
    return open_examples(
        data.split(split),
        config.length,
        config.data.rows,
        config.data.cross_documents,
        config.data.identity_weights if split == "train" else 0.0,
    )


def _model_config(
    config: TrainConfig, initial: InitialModel | None, tokenizer: Tokenizer
) -> ModelConfig:
    """Return the configuration of the model to train; that of `initial` with allowed changes."""
    if initial is None:
        return config.model_config(tokenizer.vocab_size)
    old = initial.model.config
    changes = {key: config.model[key] for key in old.changeable if key in config.model}
    modes = config.modes(type(old))
    return type(old).from_dict(
        {**old.to_dict(), "vocab_size": tokenizer.vocab_size, "modes": modes, **changes}
    )


def _build_model(
    config: TrainConfig, initial: InitialModel | None, tokenizer: Tokenizer, say: Say
) -> ConditionalModel:
    """Return the model with fresh weights, or with those of `initial`."""
    torch.manual_seed(config.seed)
    shape = _model_config(config, initial, tokenizer)
    if isinstance(shape, CausalLMConfig):
        return _build_adapter(config, shape, initial, tokenizer, say)
    model = fresh_model(config, shape)
    if initial is None:
        return model
    old_tokenizer = load_tokenizer(initial.tokenizer)
    known = {token: i for i, token in enumerate(old_tokenizer.tokens())}
    if tokenizer.fingerprint == old_tokenizer.fingerprint:
        origins = list(range(tokenizer.vocab_size))
    elif known.keys() <= set(tokenizer.tokens()):
        origins = [known.get(token, -1) for token in tokenizer.tokens()]
        say(
            f"vocabulary grown from {initial.model.config.vocab_size} to {tokenizer.vocab_size} "
            "tokens"
        )
    else:
        require_same_tokenizer(tokenizer, old_tokenizer)
    model.load_state_dict(grown_weights(initial.model, origins))
    say(f"starting from {config.init}")
    return model


def _build_adapter(
    config: TrainConfig,
    shape: CausalLMConfig,
    initial: InitialModel | None,
    tokenizer: Tokenizer,
    say: Say,
) -> CausalLM:
    """Return a causal language model with a new adapter, or with that of `initial`."""
    assert initial is not None
    assert isinstance(initial.model, CausalLM)
    require_same_tokenizer(tokenizer, load_tokenizer(initial.tokenizer))
    modes = {part.mode for part in parse_objective(config.objective, config.contexts).parts}
    initial.model.adapt(shape, sorted(modes))
    say(f"starting from {shape.base}; {initial.model.num_trained() / 1e6:.1f}M numbers are trained")
    return initial.model


def grown_weights(old: ConditionalModel, origins: list[int]) -> dict[str, torch.Tensor]:
    """Return the weights of a model under a larger vocabulary.

    Args:
        old: The model.
        origins: For each new token the row of the old embedding that it takes; -1 takes the mean of
            all old rows. The row of the mask stays last.
    """
    weights = old.state_dict()
    if origins == list(range(old.config.vocab_size)):
        return weights
    if not isinstance(old.config, TracformerConfig):
        raise ValueError(
            "the vocabulary differs from that of init, and only a Tracformer's can grow; "
            f"{old.config.model_type} needs the same tokenizer"
        )
    if old.config.columns:
        raise ValueError(
            "the vocabulary differs from that of init, whose columns cannot grow; use its tokenizer"
        )
    rows, mask = weights["embedding.weight"][:-1], weights["embedding.weight"][-1:]
    candidates = torch.cat((rows, rows.mean(0, keepdim=True)))  # index -1 picks the mean
    return {**weights, "embedding.weight": torch.cat((candidates[origins], mask))}


def _can_validate(data: PreparedData, config: TrainConfig) -> bool:
    if "validation" not in data.manifest.splits:
        return False
    packed = config.data.rows == "packed" and config.data.cross_documents
    return not packed or data.manifest.splits["validation"].tokens >= config.length


def _describe(
    config: TrainConfig,
    model: ConditionalModel,
    rows: Examples,
    clock: Clock,
    ranks: Ranks,
    say: Say,
) -> None:
    """Print the model, the length of the run, and whether it resumes."""
    shape = model.config
    say(
        f"model: {shape.model_type}, {model.num_parameters() / 1e6:.1f}M parameters, "
        f"{model.num_parameters(embeddings=False) / 1e6:.1f}M without embeddings, "
        f"modes {', '.join(shape.modes)}; objective {config.objective}"
    )
    where = f"{ranks.world} x {ranks.device.type}"
    if ranks.device.type == "cpu":
        where += f", {torch.get_num_threads()} threads"
    if clock.limited:
        end = time.strftime("%H:%M:%S", time.localtime(time.time() + clock.seconds - clock.spent))
        say(
            f"run: {config.run}: ends at {end} ({config.minutes:g} minutes from the start); "
            f"batches of {config.batch} x {config.length} tokens on {where}"
        )
    else:
        passes = config.steps * config.batch / len(rows)
        say(
            f"run: {config.run}: {config.steps} steps of {config.batch} x {config.length} tokens "
            f"({passes:.1f} passes over the data) on {where}"
        )
    if list_checkpoints(Path(config.run) / "checkpoints"):
        say(
            f"{config.run} has checkpoints: resuming from the newest undamaged one (use another "
            "run=FOLDER to start afresh)"
        )
