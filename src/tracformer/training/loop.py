"""The training loop: batch, loss over the targets of the global batch, step, log, save, validate.

Read `Trainer` from top to bottom; `train` is the loop and `_step` one optimizer step.
"""

import json
import math
import signal
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tracformer.data.examples import Examples
from tracformer.data.tokenizer import Tokenizer
from tracformer.devices import Ranks
from tracformer.files import read_record, write_atomically, write_record
from tracformer.generation.generation_config import settings_for, write_generation_config
from tracformer.model import ConditionalModel, storage
from tracformer.training import checkpoint as ckpt
from tracformer.training.checkpoint import State
from tracformer.training.clock import NEVER, Clock
from tracformer.training.log import (
    TRAINING_FILE,
    LiveLine,
    RunLog,
    describe_training,
    read_log,
    training_sentence,
)
from tracformer.training.objectives import (
    MaskSampler,
    MicroBatch,
    RankBatch,
    Stream,
    parse_objective,
)
from tracformer.training.optimizer import build_optimizer, hidden_matrices, learning_rate
from tracformer.training.train_config import TrainConfig
from tracformer.training.validation import conditional_perplexity, sample_blank

EXPORTED = "model.json"  # the step of the weights in the folder `model`
# The last validated step and the best perplexity; its checkpoint was written before.
VALIDATED = "validation.json"


def exported_step(run: Path) -> int:
    """Return the step of the weights in RUN/model; 0 if there are none."""
    exported = (run / "model" / storage.CONFIG_FILE).is_file()
    return int(read_record(run / EXPORTED).get("step", 0)) if exported else 0


class TrainingError(RuntimeError):
    """Training cannot continue; the message says where and why."""


class NotFiniteError(TrainingError):
    """The loss or its gradient is infinite or NaN."""


@dataclass(frozen=True)
class TrainingOutcome:
    """How a call of `start` ended."""

    run: str  # folder of the run
    step: int
    finished: bool
    signal: int | None = None  # signal that stopped the run


class LossOf(nn.Module):
    """The weighted loss of a micro-batch as the forward pass of a module, which DDP wraps."""

    def __init__(self, model: ConditionalModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, group: MicroBatch) -> Tensor:
        return self.model.nll(group.batch, group.mode, weights=group.weights)[0]


class Trainer:
    """A training run: model, optimizer, data and state.

    Args:
        config: Final configuration, see `tracformer.training.start.resolve`.
        model: Model to train; it is moved to the device.
        tokenizer: Tokenizer that is saved with the model.
        train: Training rows.
        valid: Held-out rows; None skips validation.
        ranks: Ranks of this run.
        data: Fingerprint of the training data; a run resumes only with the same.
        clock: Counts the time, and ends a run that has a budget; None: no budget.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: ConditionalModel,
        tokenizer: Tokenizer,
        train: Examples,
        valid: Examples | None,
        ranks: Ranks,
        data: str,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or Clock()
        self.config, self.tokenizer, self.valid, self.ranks = config, tokenizer, valid, ranks
        self.run = Path(config.run)
        self.model = model.to(ranks.device)
        self.model.checkpoint_activations = config.checkpoint_activations
        self.loss_of = self._parallel(LossOf(self.model))
        fused = ranks.device.type in ("cpu", "cuda") and not self._sharded
        self.optimizer = build_optimizer(
            self.model.trained_parameters().values(),
            config.optimizer,
            fused,
            hidden_matrices(self.model),
        )
        self.state = State(
            self.model,
            self.optimizer,
            ranks,
            self._sharded,
            config.ema,
            data,
            config.recipe(),
            take_changes=config.changes == "take",
            clock=self.clock,
        )
        masks = MaskSampler(parse_objective(config.objective, config.contexts), config.seed)
        self.stream = Stream(
            train,
            masks,
            config.batch,
            config.micro_batch,
            config.seed,
            ranks,
            lockstep=self._sharded,
        )
        self.bfloat16 = config.precision == "bfloat16" or (
            config.precision == "auto"
            and ranks.device.type == "cuda"
            and torch.cuda.is_bf16_supported()
        )
        if self.bfloat16 and not self._sharded:
            self.model.round_frozen(torch.bfloat16)  # once, not in every step
        self._signal: int | None = None
        self._validated = 0  # the last validated step
        self._intact: set[Path] = set()  # checkpoints that this process wrote or read

    # ---- the loop

    def train(self) -> TrainingOutcome:
        """Train from the current step to the last one, to `until`, or until a signal arrives.

        In a run with a budget the clock decides which step is the last, and a signal makes the
        learning rate decay at once.
        """
        config, state, clock = self.config, self.state, self.clock
        end = self._last_step()
        again = self._validation_due(end)
        log = RunLog(self.run, state.step, validates_again=again) if self.ranks.first else None
        line = LiveLine(config.steps, state.step, clock) if self.ranks.first else None
        tokens, loss_sum, since, marked = 0.0, 0.0, 0, time.monotonic()
        with self._catching_signals(), closing(line) if line is not None else nullcontext():
            if again:
                self._validate(log, line)
                marked = time.monotonic()
            while state.step < end:
                began, step_began = time.process_time(), time.monotonic()
                batch = self.stream.at(state.position)
                loss, norm, seen, stop = self._step(batch)
                state.cpu_seconds += time.process_time() - began
                if clock.limited:
                    if stop:
                        clock.stop()
                    self._tick(time.monotonic() - step_began)
                    end, stop = self._last_step(), False
                tokens, loss_sum, since = tokens + seen, loss_sum + loss, since + 1
                speed = tokens / (time.monotonic() - marked)
                if line is not None:
                    line.update(state.step, loss_sum / since, speed)
                if state.step % config.log_every == 0 or state.step == end:
                    if log is not None:
                        rate = self.optimizer.param_groups[0]["lr"]  # AdamW's
                        log.write(
                            "train",
                            state.step,
                            loss=loss_sum / since,
                            lr=rate,
                            gradient_norm=norm,
                            tokens_per_second=round(speed, 1),
                            seconds=round(clock.spent, 1),
                        )
                    tokens, loss_sum, since, marked = 0.0, 0.0, 0, time.monotonic()
                if state.step % config.save_every == 0 or state.step == end or stop:
                    self._save()
                    tokens, marked = 0.0, time.monotonic()
                if self._validation_due(end):
                    self._validate(log, line)
                    tokens, marked = 0.0, time.monotonic()
                if stop:
                    break
        finished = state.step == (clock.end if clock.limited else config.steps)
        self._export("model")
        if self.ranks.first:
            write_record(self.run / EXPORTED, {"step": state.step})
        if line is not None:
            line.say(
                f"{'finished' if finished else 'stopped'} at step {state.step}; model in "
                f"{self.run / 'model'}"
            )
        if log is not None:
            log.close()
        return TrainingOutcome(str(self.run), state.step, finished, self._signal)

    def describe_training(self) -> dict[str, Any]:
        """Return how the present weights were trained; tokens are estimated from some rows."""
        rows, state = self.stream.rows, self.state
        _, lengths = rows.get(np.arange(min(256, len(rows))))
        tokens, seconds = state.position * float(lengths.mean()), self.clock.spent
        return describe_training(self.config, state.step, tokens, seconds, self.ranks)

    def _last_step(self) -> int:
        """Return the last step of this call, as far as it is known."""
        last = self.clock.end if self.clock.limited else self.config.steps
        return min(last, self.config.until or last)

    def _tick(self, seconds: float) -> None:
        """Let the first rank's clock decide for all ranks."""
        clock, known = self.clock, len(self.clock.decays)
        if self.ranks.first:
            clock.tick(self.state.step, seconds)
        if self.ranks.world > 1:
            [end] = self.ranks.total([float(clock.end) if len(clock.decays) > known else 0.0])
            if end and not self.ranks.first:
                clock.aim(self.state.step, int(end))

    def _step(self, batch: RankBatch) -> tuple[float, float, float, bool]:
        """Take one optimizer step.

        Returns:
            The loss per target, the gradient norm, the number of tokens, and whether some rank
            received a signal.
        """
        config, state = self.config, self.state
        # Dropout depends on the step only, so that a resumed run repeats it.
        torch.manual_seed(seed_of(config.seed, state.step, self.ranks.rank))
        self.optimizer.set_rate(
            learning_rate(state.step, config.steps or NEVER, config.optimizer, self.clock.decays)
        )
        count, seen = self.ranks.total([float(batch.count), float(batch.tokens)])
        self.model.train()
        self.optimizer.zero_grad()
        total = 0.0
        for number, group in enumerate(batch.micro_batches, start=1):
            with self._accumulating(last=number == len(batch.micro_batches)):
                with self._autocast():
                    nll = self.loss_of(group.to(self.ranks.device))
                # Eqs. 7 and 8 over the targets of the global batch. Ranks average their gradients,
                # hence the factor.
                (nll * (self.ranks.world / count)).backward()
            total += float(nll.detach())
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), config.optimizer.clip))
        total, stops = self.ranks.total([total, float(self._signal is not None)])
        loss = total / count
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._save()  # the state before this step: nothing has been updated yet
            what = "the loss" if not math.isfinite(loss) else "the gradient"
            raise NotFiniteError(
                f"{what} of step {state.step + 1} is not finite (loss {loss}, gradient norm "
                f"{norm}). "
                f"The state after step {state.step} was saved. The batch has rows "
                f"{_brief(batch.indices)} of the training data, "
                f"numbers {batch.numbers.start} to {batch.numbers.stop - 1} of the stream. "
                "Try a lower optimizer.lr, or check those rows."
            )
        self.optimizer.step()
        state.advance(config.batch)
        return loss, norm, seen, stops > 0

    # ---- parts of the loop

    @property
    def _sharded(self) -> bool:
        return self.ranks.world > 1 and self.config.parallel == "fsdp"

    def _parallel(self, loss_of: LossOf) -> nn.Module:
        model = loss_of.model
        if self.config.compile:
            for layer in model.blocks():
                layer.compile()
        if self._sharded:
            from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

            for layer in model.blocks():
                fully_shard(layer)
            fully_shard(model)
            for method in ("nll", "log_prob"):
                register_fsdp_forward_method(model, method)
            return loss_of
        if self.ranks.world > 1:
            devices = [self.ranks.device.index] if self.ranks.device.type == "cuda" else None
            return DistributedDataParallel(
                loss_of, device_ids=devices, gradient_as_bucket_view=True
            )
        return loss_of

    def _accumulating(self, last: bool) -> Any:
        """Return a context in which ranks exchange gradients on the last micro-batch only."""
        if isinstance(self.loss_of, DistributedDataParallel) and not last:
            return self.loss_of.no_sync()
        if self._sharded:
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()

    def _autocast(self) -> Any:
        return (
            torch.autocast(self.ranks.device.type, torch.bfloat16)
            if self.bfloat16
            else nullcontext()
        )

    def resume(self) -> None:
        """Load the newest undamaged checkpoint, if there is one."""
        path, skipped = ckpt.newest_intact(self.run / "checkpoints")
        if self.ranks.first:
            for sentence in skipped:
                print(f"skipped a damaged checkpoint: {sentence}", flush=True)
        if path is None and skipped:
            raise ValueError(
                f"every checkpoint in {self.run / 'checkpoints'} is damaged, and a new start would "
                "overwrite log and model; use another run=FOLDER "
                f"(init={self.run / 'model'} starts from the last exported weights), or remove "
                f"{self.run / 'checkpoints'}"
            )
        if path is not None:
            self.state.load(ckpt.Reader(path))
            self._intact.add(path)
            log = self.run / "log.jsonl"
            spent = [record.get("seconds", 0.0) for record in read_log(log)] if log.exists() else []
            self.clock.before = max(self.clock.before, *spent, 0.0)  # a crash lost the steps only
            if self.ranks.first:
                print(f"resuming from {path} (step {self.state.step})", flush=True)
        saved = read_record(self.run / VALIDATED)  # without it the validation is repeated
        if saved.get("step") == self.state.step:
            self._validated, self.state.best = saved["step"], saved["best"]

    def _save(self) -> None:
        """Write a checkpoint and remove old ones."""
        folder = self.run / "checkpoints"
        writer = ckpt.CheckpointWriter(folder, self.state.step)
        try:
            if self.ranks.first:
                writer.begin()
            self.ranks.barrier()
            for kind, shard in self.state.shards().items():
                writer.write_shard(
                    kind, shard, *((self.ranks.rank, self.ranks.world) if self._sharded else (0, 1))
                )
            self.ranks.barrier()
            if self.ranks.first:
                written = writer.finish(self.state.describe())
                self._intact.add(written)
                ckpt.prune(folder, self.config.keep, written, self._intact)
        except OSError as error:
            writer.abandon()
            raise TrainingError(
                f"the checkpoint of step {self.state.step} could not be written to {folder}: "
                f"{error.strerror or error}. "
                "Earlier checkpoints are intact; free some space or use another folder, then run "
                "the same command to continue."
            ) from error
        self.ranks.barrier()

    def _validation_due(self, end: int) -> bool:
        step = self.state.step
        return (
            self.valid is not None
            and step != self._validated
            and (step % self.config.eval_every == 0 or step == end)
        )

    def _validate(self, log: RunLog | None, line: LiveLine | None) -> None:
        """Log held-out perplexities and a sample; export the model if it is the best so far."""
        assert self.valid is not None
        began = time.monotonic()
        self.model.eval()
        results: dict[str, float] = {}
        with self.state.averaged_weights(), self._autocast():
            for mode in self.model.config.modes:
                for strategy in ("empty",) if mode == "ar" else self.config.eval_contexts:
                    ppl = conditional_perplexity(
                        self.model,
                        self.valid,
                        mode,
                        strategy,
                        self.config.eval_sequences,
                        self.ranks,
                    )
                    results[f"{mode} {strategy}"] = ppl
            samples = [] if self._sharded else self._samples()
            first = next(iter(results.values()))
            if first < self.state.best:
                self.state.best = first
                self._export("best", averaged=False)
        if log is not None and line is not None:
            spent = {"cpu_seconds": round(self.state.cpu_seconds, 2)}
            log.write(
                "eval",
                self.state.step,
                **spent,
                **{name: round(value, 4) for name, value in results.items()},
            )
            line.validated(self.state.step, results)
            for sample in samples:
                log.write("sample", self.state.step, text=sample)
                line.say(f"  {sample}")
            found = {"step": self.state.step, "best": self.state.best}
            write_record(self.run / VALIDATED, found)
        self._validated = self.state.step
        # the validation after the last step and the summary, which costs about as much
        self.clock.reserve = max(self.clock.reserve, 2.5 * (time.monotonic() - began) + 2.0)

    def _samples(self) -> list[str]:
        """Return parts of held-out rows with a blank filled by the model.

        One part, or two in a run with a budget.
        """
        assert self.valid is not None
        mode, around, found = next(iter(self.model.config.modes)), 24, []
        for row in range(min(2, len(self.valid)) if self.clock.limited else 1):
            tokens, start, stop, fill = sample_blank(
                self.model, self.valid, mode, self.config.seed, self.ranks.device, row
            )
            pieces = (tokens[max(0, start - around) : start], fill, tokens[stop : stop + around])
            before, filled, after = (
                self.tokenizer.decode(piece, inside=i > 0).replace("\n", " ")
                for i, piece in enumerate(pieces)
            )
            found.append(f"...{before}[[{filled}]]{after}...")
        return found

    def _export(self, name: str, averaged: bool = True) -> None:
        """Write a model folder, by default with the averaged weights if there are any."""
        with self.state.averaged_weights() if averaged else nullcontext():
            weights = self.state.full_weights()
        if self.ranks.first:
            storage.save(self.run / name, self.model.config, weights)
            self.tokenizer.save(self.run / name)
            write_generation_config(self.run / name, settings_for(self.tokenizer))
            facts = self.describe_training()
            write_atomically(self.run / name / TRAINING_FILE, json.dumps(facts, indent=1) + "\n")
            if (card := self.model.card(training_sentence(self.config, facts))) is not None:
                write_atomically(self.run / name / "README.md", card)
        self.ranks.barrier()

    def _catching_signals(self) -> Any:
        return _Signals(self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            raise KeyboardInterrupt  # second signal: do not wait for the step
        self._signal = number
        if self.ranks.first:
            what = "lowering the learning rate to 0" if self.clock.limited else "saving"
            print(
                f"\n{signal.Signals(number).name}: {what} after this step; send it again to stop "
                "immediately",
                flush=True,
            )


class _Signals:
    """A context in which SIGINT and SIGTERM call `handler`."""

    def __init__(self, handler: Callable[[int, FrameType | None], None]) -> None:
        self.handler = handler
        self.before: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self.before[number] = signal.signal(number, self.handler)
            except ValueError:  # not in the main thread: the caller handles signals
                return

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def seed_of(seed: int, step: int, rank: int) -> int:
    """Return a seed for each (seed, step, rank)."""
    return (
        seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB
    ) % 2**63


def _brief(numbers: list[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:8])
    return shown + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
