"""The plan of a run with a budget of minutes: size, rows, batch and schedule from data and speed.

The rule, which `make_plan` applies to everything that the user left open:

1. Tokenizer: by the amount of text, see `tracformer.data.choose_tokenizer`.
2. Rows: sequences of a FASTA file are one to a row, as long as the longest of them allows (up to
   1,024); text is cut into rows of 256 tokens, or of 128 where documents are short or few.
3. Size: each width of `WIDTHS`, from the smallest on, trains a few timed steps here; the budget
   then gives the number D of tokens that it would see. The size of least expected loss is taken, by
   L = 406.4 / N^0.34 + 410.7 / D^0.28 for N parameters (Hoffmann et al. 2022, approach 3).
   Repeated passes count less: U different tokens seen R + 1 times count as
   U + 15.4 U (1 - exp(-R / 15.4)) (Muennighoff et al. 2023).
4. Batch: a power of two of rows, such that the run has about `STEPS` steps.
5. Optimizer: Muon (AdamW for what is no matrix of a layer), which learns far more than AdamW in a
   few hundred steps. Rate: 6e-3 at width 96 and less by the root of the width; warm-up over 5% of
   the steps, then constant, then a linear decay to 0 over the last `DECAY_SHARE` of the time.
6. Dropout: 0.1 if the data is seen more than four times, 0.2 beyond twenty.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from tracformer.baselines import find_family
from tracformer.data import Examples, PreparedData, Records, name_of, open_examples
from tracformer.data.make_tokenizer import ALPHABETS
from tracformer.devices import Ranks, require_memory
from tracformer.model import ConditionalModel, ModelConfig, Tracformer, TracformerConfig
from tracformer.model.storage import on_meta
from tracformer.training.clock import Clock
from tracformer.training.objectives import MaskSampler, Stream, parse_objective
from tracformer.training.optimizer import build_optimizer, hidden_matrices
from tracformer.training.train_config import OptimizerConfig, TrainConfig, default_preset

FAMILY = "tracformer"  # the system that is trained unless the user names another
DEFAULT_MINUTES = 10.0
LEAST_TOKENS = 1000  # of training data
WIDTHS = (48, 64, 96, 128, 192, 256, 384, 512, 768)
STEPS = 1500
ROW_TOKENS, SHORT_ROW, LONGEST_ROW = 256, 128, 1024
BATCH_TOKENS = (1024, 65536)  # least and most tokens of a batch
MEASURED_TOKENS = 4096  # of a timed batch
WARM_STEPS, TIMED_STEPS = 2, 3
MEASURING_SHARE = 0.06  # of the budget, for all timed steps
VALIDATION_SHARE = 0.05  # of the time between validations
REPEATS = 15.4  # passes after which a further one teaches next to nothing
BASE_RATE, BASE_WIDTH, BASE_STD = 6e-3, 96, 0.06

Build = Callable[[TrainConfig], ConditionalModel]
Base = Callable[[Mapping[str, Any]], TrainConfig]


BYTES_IN_TRAINING = 12  # of a parameter: weight, gradient, and at least one state of the optimizer


class Pace(NamedTuple):
    """What a few timed steps of a model showed."""

    parameters: int  # without embeddings
    tokens_per_second: float


def planned_rows(data: PreparedData) -> dict[str, Any]:
    """Return `length` and `data.rows` from the lengths of the documents.

    Raises:
        ValueError: There is too little data to train on.
    """
    split = data.split("train")
    tokens = len(split.tokens)
    if tokens < LEAST_TOKENS:
        raise ValueError(
            f"the data has {tokens:,} training tokens; at least {LEAST_TOKENS:,} are needed. Give "
            "more text, or adapt a trained model to it with init=stories"
        )
    lengths = np.diff(split.index)  # with the end of text
    if name_of(data.tokenizer) in ALPHABETS and lengths.max(initial=0) <= 4 * LONGEST_ROW:
        equal = (lengths == lengths[0]).all()  # an alignment: no row for its end of text
        longest = int(lengths.max()) - int(equal)
        return {"length": min(LONGEST_ROW, longest), "data": {"rows": "records"}}
    short = float(np.median(lengths)) <= SHORT_ROW or tokens < 100 * ROW_TOKENS
    wanted = SHORT_ROW if short else ROW_TOKENS
    held_out = data.manifest.splits.get("validation")
    if held_out is not None:
        wanted = min(wanted, max(16, held_out.tokens // 4))  # some rows to validate on
    return {"length": wanted, "data": {"rows": "packed"}}


def shape_of(width: int, length: int) -> dict[str, Any]:
    """Return the fields of a `FAMILY` model of this width for rows of this length."""
    return {
        "max_length": max(16, length),
        "n_layer": max(4, math.ceil(math.log2(max(2, length)))),
        "n_head": max(2, width // (64 if width >= 128 else 32)),
        "d_model": width,
        "n_max": 16 if length > SHORT_ROW else 8,
        "init_std": round(max(0.02, BASE_STD * math.sqrt(BASE_WIDTH / width)), 4),
    }


def effective_tokens(seen: float, different: float) -> float:
    """Return the number of fresh tokens that teach as much as `seen` tokens of repeated passes.

    >>> effective_tokens(500, 1000)
    500
    """
    if seen <= different:
        return seen
    return different * (1 + REPEATS * (1 - math.exp(-(seen / different - 1) / REPEATS)))


def expected_loss(parameters: float, tokens: float) -> float:
    """Return the reducible loss by Hoffmann et al. (2022), approach 3."""
    return 406.4 / parameters**0.34 + 410.7 / tokens**0.28


def make_plan(
    config: TrainConfig,
    base: Base | None,
    build: Build,
    data: PreparedData,
    clock: Clock,
    ranks: Ranks,
    fixed: ModelConfig | None = None,
) -> TrainConfig:
    """Return a configuration with everything planned that the user left open.

    Args:
        config: What the user said.
        base: Returns the configuration with planned values as its base, under the user's words;
            None if a preset decides size, rows and batch.
        build: Returns a fresh model of a configuration.
        data: Prepared training data.
        clock: Time of the run.
        ranks: Ranks that share the run; the first one's measurements count.
        fixed: Configuration of the model that the run starts from.

    Raises:
        ValueError: There is too little data, or too little time.
    """
    budget, different = clock.seconds, float(data.manifest.splits["train"].tokens)
    planned: dict[str, Any] = {"minutes": config.minutes, "optimizer": {"name": "muon"}}
    if base is None:
        chosen = dataclasses.replace(config, length=config.length)
        speed = _measure(chosen, build, data, ranks)
    else:
        planned |= planned_rows(data)
        family = str(config.model.get("family", FAMILY))
        if fixed is not None:
            planned["length"] = min(planned["length"], fixed.max_length)
            chosen = base(planned)
            speed = _measure(chosen, build, data, ranks)
        elif family != FAMILY or "preset" in config.model:
            kind = find_family(family).config_class
            small = different < 1_000_000
            names = ("tiny", "mini", "laptop") if small else ("laptop", "mini", "tiny")
            name = config.model.get("preset") or default_preset(kind, *names)
            planned["model"] = {"family": family, **({"preset": name} if name else {})}
            longest = base({"model": planned["model"]}).model_config(256).max_length
            planned["length"] = min(planned["length"], longest)
            chosen = base(planned)
            speed = _measure(chosen, build, data, ranks)
        else:
            planned, speed = _best_size(planned, base, build, data, clock, ranks)
            chosen = base(planned)
    if ranks.device.type == "cpu" and not config.threads:
        speed, planned["threads"] = _best_threads(chosen, speed, build, data, ranks)
    seconds = max(1.0, clock.left * 0.9)
    tokens = speed.tokens_per_second * seconds
    width = int(getattr(build(chosen).config, "d_model", BASE_WIDTH))
    length, rows = chosen.length or ROW_TOKENS, chosen.batch
    if base is not None:
        least, most = (max(1, limit // length) for limit in BATCH_TOKENS)
        rows = 2 ** round(math.log2(max(1.0, tokens / STEPS / length)))
        rows = min(max(rows, 2 ** round(math.log2(max(4, least)))), max(4, most))
        rows = max(ranks.world, rows - rows % ranks.world)
        planned["batch"] = rows
        passes = tokens / different
        planned.setdefault("model", {})["dropout"] = (
            0.0 if passes <= 4 else 0.1 if passes <= 20 else 0.2
        )
        if fixed is not None and not hasattr(fixed, "dropout"):
            del planned["model"]["dropout"]
    steps = max(1, int(tokens / (rows * length)))
    between = min(60.0, max(10.0, budget / 6))
    steps_between = max(1, round(between * steps / seconds))
    per_row = 5 * length / (2.5 * speed.tokens_per_second)  # five figures, forward passes only
    watched: dict[str, Any] = {
        "eval_every": steps_between,
        "save_every": steps_between,
        "log_every": max(1, min(10, steps_between // 4)),
        "eval_sequences": int(min(64, max(8, VALIDATION_SHARE * between / per_row))),
        "eval_contexts": ["span:p=0.5,mean=10", "span:p=0.15,mean=5"],
    }
    rate = {
        "name": "muon" if hidden_matrices(build(chosen)) else "adamw",
        "schedule": "wsd",
        "lr": round(BASE_RATE * math.sqrt(BASE_WIDTH / width) * (0.3 if fixed else 1.0), 6),
        "warmup": min(100, max(1, steps // 20)),
    }
    if base is not None:
        final = base({**planned, **watched, "optimizer": rate})
    else:
        warmup = min(config.optimizer.warmup, max(1, steps // 20))
        lr, final_lr = config.optimizer.lr, 0.0
        optimizer = dataclasses.replace(
            config.optimizer, schedule="wsd", lr=lr, final_lr=final_lr, warmup=warmup
        )
        watched["eval_contexts"] = config.eval_contexts
        watched["threads"] = planned.get("threads", config.threads)
        final = dataclasses.replace(config, optimizer=optimizer, **watched)
    validation = final.eval_sequences * per_row
    clock.reserve = 2.5 * validation + 2.0
    needed = 2 * validation + 5 * rows * length / speed.tokens_per_second
    if clock.left < needed:
        used = clock.spent + clock.reserve + needed
        raise ValueError(
            f"minutes is {config.minutes:g}, too short to train and validate once: preparing and "
            f"measuring took {clock.spent:.0f} s, and a few steps with one validation take about "
            f"{used - clock.spent:.0f} s; use --minutes {math.ceil(10 * 2 * used / 60) / 10:g} or "
            "more"
        )
    return final


def _best_size(
    planned: dict[str, Any],
    base: Base,
    build: Build,
    data: PreparedData,
    clock: Clock,
    ranks: Ranks,
) -> tuple[dict[str, Any], Pace]:
    """Return the planned values with the model of least expected loss, and its speed."""
    different, started = float(data.manifest.splits["train"].tokens), clock.spent
    best: tuple[float, dict[str, Any], Pace] | None = None
    for width in WIDTHS:
        model = {"family": FAMILY, **shape_of(width, planned["length"])}
        values = {**planned, "model": model}
        speed = _measure(base(values), build, data, ranks)
        seen = speed.tokens_per_second * max(1.0, clock.left * 0.9)
        loss = expected_loss(speed.parameters, effective_tokens(seen, different))
        if best is not None and loss >= best[0]:
            break
        best = (loss, values, speed)
        # the next width takes up to twice the time
        used = clock.spent - started
        [late] = ranks.total([float(ranks.first and 1.5 * used > MEASURING_SHARE * clock.seconds)])
        if late:
            break
    assert best is not None
    return best[1], best[2]


def _best_threads(
    config: TrainConfig, speed: Pace, build: Build, data: PreparedData, ranks: Ranks
) -> tuple[Pace, int]:
    """Return the better speed and number of threads: the present ones, or half as many.

    On a busy machine, threads that wait for each other can be slower than fewer threads.
    """
    threads = torch.get_num_threads()
    if threads == 1 or ranks.world > 1:
        return speed, threads
    torch.set_num_threads(threads // 2)
    fewer = _measure(config, build, data, ranks)
    if fewer.tokens_per_second > speed.tokens_per_second:
        return fewer, threads // 2
    torch.set_num_threads(threads)
    return speed, threads


def _measure(config: TrainConfig, build: Build, data: PreparedData, ranks: Ranks) -> Pace:
    """Return size and speed of the model of a configuration, by a few warm training steps."""
    model = build(config).to(ranks.device)
    length = config.length or model.config.max_length
    rows = open_examples(data.split("train"), length, config.data.rows, config.data.cross_documents)
    batch = max(1, MEASURED_TOKENS // length)
    masks = MaskSampler(parse_objective(config.objective, config.contexts), config.seed)
    stream = Stream(rows, masks, batch, config.micro_batch, config.seed, Ranks(0, 1, ranks.device))
    fused = ranks.device.type in ("cpu", "cuda")
    optimizer = build_optimizer(model.parameters(), *_fitting(config, model, fused))
    bfloat16 = config.precision == "bfloat16" or (
        config.precision == "auto"
        and ranks.device.type == "cuda"
        and torch.cuda.is_bf16_supported()
    )
    tokens, began = 0, time.monotonic()
    for step in range(WARM_STEPS + TIMED_STEPS):
        if step == WARM_STEPS:
            tokens, began = 0, time.monotonic()
        part = stream.at(step * batch)
        optimizer.zero_grad()
        loss = 0.0
        for group in part.micro_batches:
            with torch.autocast(ranks.device.type, torch.bfloat16, enabled=bfloat16):
                nll, _ = model.nll(group.to(ranks.device).batch, group.mode, weights=group.weights)
            nll.backward()
            loss += float(nll.detach())  # waits for the device
        optimizer.step()
        tokens += part.tokens
    speed = tokens / max(1e-6, time.monotonic() - began)
    [speed] = ranks.total([speed if ranks.first else 0.0])
    return Pace(model.num_parameters(embeddings=False), speed * ranks.world)


def _fitting(
    config: TrainConfig, model: ConditionalModel, fused: bool
) -> tuple[OptimizerConfig, bool, list[torch.nn.Parameter]]:
    """Return the arguments of `build_optimizer`: AdamW if Muon has no matrices to update."""
    matrices = hidden_matrices(model)
    if config.optimizer.name == "muon" and not matrices:
        return dataclasses.replace(config.optimizer, name="adamw"), fused, []
    return config.optimizer, fused, matrices


def with_columns(config: TrainConfig, data: PreparedData) -> TrainConfig:
    """Return the configuration with the length and depth that `model.columns` requires.

    Raises:
        ValueError: The rows are not those of an alignment.
    """
    if not config.model.get("columns"):
        return config
    if config.data.rows != "records":
        raise ValueError(
            f"data.rows is {config.data.rows!r}; model.columns needs one sequence per row: "
            "data.rows=records"
        )
    columns = Records(data.split("train"), 1).columns
    shape = {"max_length": columns, "n_layer": max(1, (columns - 1).bit_length())}
    return dataclasses.replace(config, model={**shape, **config.model})


def start_columns(model: ConditionalModel, rows: Examples) -> None:
    """Start a model with `columns` from the share of each token in each column."""
    if isinstance(model, Tracformer) and model.config.columns and isinstance(rows, Records):
        model.start_columns(torch.from_numpy(rows.column_shares(model.config.vocab_size)))


def fresh_model(config: TrainConfig, shape: ModelConfig) -> ConditionalModel:
    """Return a model with fresh weights, drawn from the seed of the configuration.

    Raises:
        ValueError: Training it needs more memory than this machine has.
    """
    kind = find_family(shape.model_type).model_class
    if kind.built_on_meta:
        with on_meta():
            numbers = kind(shape).num_parameters()
        require_memory(numbers * BYTES_IN_TRAINING, "training this model")
    torch.manual_seed(config.seed)
    return (
        Tracformer(shape, config.attention) if isinstance(shape, TracformerConfig) else kind(shape)
    )
