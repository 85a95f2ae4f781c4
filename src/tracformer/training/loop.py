"""The training loop, to be read from top to bottom: batch, loss over the global batch's targets,
step, log, save, validate.
"""

import json
import math
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tracformer.data.examples import Examples
from tracformer.data.tokenizer import Tokenizer
from tracformer.distributed import Ranks
from tracformer.files import write_atomically
from tracformer.model import ConditionalModel, storage
from tracformer.training import checkpoint as ckpt
from tracformer.training.batches import Group, MicroBatch, Stream
from tracformer.training.checkpoint import State
from tracformer.training.log import LiveLine, RunLog
from tracformer.training.objectives import Questioner, parse_objective
from tracformer.training.optimizer import build_optimizer, hidden_matrices, learning_rate
from tracformer.training.train_config import TrainConfig
from tracformer.training.validation import conditional_perplexity, sample_hole

EXPORTED = "model.json"  # of which step `model` is
# the step last validated, and the best so far: its checkpoint was written before
VALIDATED = "validation.json"


def exported_step(run: Path) -> int:
    """Of how many steps the weights in RUN/model are; 0 if there are none."""
    path = run / EXPORTED
    return (
        int(json.loads(path.read_text())["step"])
        if path.is_file() and (run / "model" / storage.CONFIG_FILE).is_file()
        else 0
    )


class TrainingError(RuntimeError):
    """The run cannot go on; the message says where and why."""


class NotFiniteError(TrainingError):
    """The loss or its gradient is infinite or no number."""


@dataclass(frozen=True)
class Outcome:
    run: str  # its folder
    step: int
    finished: bool
    signal: int | None = None


class LossOf(nn.Module):
    """The sum of a micro-batch's weighted terms, as the forward of a module: what
    DDP wants to wrap.
    """

    def __init__(self, model: ConditionalModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, group: Group) -> Tensor:
        return self.model.nll(group.batch, group.mode, weights=group.weights)[0]


class Trainer:
    def __init__(
        self,
        config: TrainConfig,
        model: ConditionalModel,
        tokenizer: Tokenizer,
        train: Examples,
        valid: Examples | None,
        ranks: Ranks,
        data: str,
    ) -> None:
        """`data`: the fingerprint of what `train` was cut from; a run goes on with
        the same alone.
        """
        self.config, self.tokenizer, self.valid, self.ranks = config, tokenizer, valid, ranks
        self.run = Path(config.run)
        self.model = model.to(ranks.device)
        self.model.checkpoint_activations = config.checkpoint_activations
        self.loss_of = self._parallel(LossOf(self.model))
        fused = ranks.device.type in ("cpu", "cuda") and not self._sharded
        self.optimizer = build_optimizer(
            self.model.parameters(), config.optimizer, fused, hidden_matrices(self.model)
        )
        told = (config.recipe(), config.changes == "take")
        self.state = State(
            self.model, self.optimizer, ranks, self._sharded, config.ema, data, *told
        )
        questioner = Questioner(parse_objective(config.objective, config.contexts), config.seed)
        self.stream = Stream(
            train,
            questioner,
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
        self._signal: int | None = None
        self._validated = 0  # the last step that was
        self._whole: set[Path] = set()  # checkpoints that were written or read here

    # ---- the loop

    def train(self) -> Outcome:
        """From where the state stands to the last step, to `until` or to the first signal."""
        config, state = self.config, self.state
        end = min(config.steps, config.until or config.steps)
        again = self._validation_due(end)
        log = RunLog(self.run, state.step, validates_again=again) if self.ranks.first else None
        line = LiveLine(config.steps, state.step) if self.ranks.first else None
        tokens, loss_sum, since, marked = 0.0, 0.0, 0, time.monotonic()
        with self._catching_signals():
            if again:
                self._validate(log, line)
                marked = time.monotonic()
            while state.step < end:
                began = time.process_time()
                batch = self.stream.at(state.position)
                loss, norm, seen, stop = self._step(batch)
                state.cpu_seconds += time.process_time() - began
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
        finished = state.step == config.steps
        self._export("model")
        if self.ranks.first:
            write_atomically(self.run / EXPORTED, json.dumps({"step": state.step}) + "\n")
        if line is not None:
            line.say(
                f"{'finished' if finished else 'stopped'} at step {state.step}; model in "
                f"{self.run / 'model'}"
            )
        if log is not None:
            log.close()
        return Outcome(str(self.run), state.step, finished, self._signal)

    def _step(self, batch: MicroBatch) -> tuple[float, float, float, bool]:
        """One optimiser step.

        Returns the loss per target, the gradient norm, tokens seen, and whether some rank was told
        to stop.
        """
        config, state = self.config, self.state
        # dropout: a function of the step, so resuming repeats it
        torch.manual_seed(seed_of(config.seed, state.step, self.ranks.rank))
        self.optimizer.set_rate(learning_rate(state.step, config.steps, config.optimizer))
        count, seen = self.ranks.total([float(batch.count), float(batch.tokens)])
        self.model.train()
        self.optimizer.zero_grad()
        total = 0.0
        for number, group in enumerate(batch.micro, start=1):
            with self._accumulating(last=number == len(batch.micro)):
                with self._autocast():
                    nll = self.loss_of(group.to(self.ranks.device))
                # Eqs. 7 and 8 over the targets of the global batch; ranks average their gradients,
                # hence the factor
                (nll * (self.ranks.world / count)).backward()
            total += float(nll.detach())
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), config.optimizer.clip))
        total, stops = self.ranks.total([total, float(self._signal is not None)])
        loss = total / count
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._save()  # of the state before this step: nothing has been updated yet
            what = "the loss" if not math.isfinite(loss) else "the gradient"
            raise NotFiniteError(
                f"{what} of step {state.step + 1} is not finite (loss {loss}, gradient norm "
                f"{norm}). "
                f"The weights are as after step {state.step} and saved. The batch: rows "
                f"{_brief(batch.indices)} of the training data, "
                f"numbers {batch.numbers.start} to {batch.numbers.stop - 1} of the stream. "
                f"Try a lower optimizer.lr, or look at those rows."
            )
        self.optimizer.step()
        state.advance(config.batch)
        return loss, norm, seen, stops > 0

    # ---- its parts

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
        """Ranks exchange gradients on the last micro-batch only."""
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
        """Go to the newest whole checkpoint, if there is one."""
        path, skipped = ckpt.newest_whole(self.run / "checkpoints")
        if self.ranks.first:
            for sentence in skipped:
                print(f"skipped a damaged checkpoint: {sentence}", flush=True)
        if path is None and skipped:
            raise ValueError(
                f"no checkpoint in {self.run / 'checkpoints'} is whole, and a new start would "
                "overwrite log and model; use another "
                f"run=FOLDER (init={self.run / 'model'} goes on from the last weights written "
                f"there), or remove {self.run / 'checkpoints'}"
            )
        if path is not None:
            self.state.load(ckpt.Reader(path))
            self._whole.add(path)
            if self.ranks.first:
                print(f"resuming from {path} (step {self.state.step})", flush=True)
        record = self.run / VALIDATED
        if record.is_file() and (told := json.loads(record.read_text()))["step"] == self.state.step:
            self._validated, self.state.best = told["step"], told["best"]

    def _save(self) -> None:
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
                self._whole.add(written)
                ckpt.prune(folder, self.config.keep, written, self._whole)
        except OSError as error:
            writer.abandon()
            raise TrainingError(
                f"the checkpoint of step {self.state.step} could not be written to {folder}: "
                f"{error.strerror or error}. "
                "Earlier checkpoints are whole; make room or pick another folder, then run the "
                "same command to go on."
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
        assert self.valid is not None
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
            sample = None if self._sharded else self._sample()
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
            line.say(
                f"step {self.state.step}: perplexity "
                + ", ".join(f"{name}: {value:.2f}" for name, value in results.items())
            )
            if sample is not None:
                log.write("sample", self.state.step, text=sample)
                line.say(f"  {sample}")
            write_atomically(
                self.run / VALIDATED,
                json.dumps({"step": self.state.step, "best": self.state.best}) + "\n",
            )
        self._validated = self.state.step

    def _sample(self) -> str:
        assert self.valid is not None
        mode = next(iter(self.model.config.modes))
        tokens, start, stop, fill = sample_hole(
            self.model, self.valid, mode, self.config.seed, self.ranks.device
        )
        around = 24
        pieces = (tokens[max(0, start - around) : start], fill, tokens[stop : stop + around])
        before, filled, after = (
            self.tokenizer.decode(piece, inside=i > 0).replace("\n", " ")
            for i, piece in enumerate(pieces)
        )
        return f"...{before}[[{filled}]]{after}..."

    def _export(self, name: str, averaged: bool = True) -> None:
        """A plain model folder that anything can load; the averaged weights where there are any."""
        with self.state.averaged_weights() if averaged else nullcontext():
            weights = self.state.full_weights()
        if self.ranks.first:
            storage.save(self.run / name, self.model.config, weights)
            self.tokenizer.save(self.run / name)
        self.ranks.barrier()

    def _catching_signals(self) -> Any:
        return _Signals(self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            raise KeyboardInterrupt  # asked twice: do not wait for the step
        self._signal = number
        if self.ranks.first:
            print(
                f"\n{signal.Signals(number).name}: saving after this step; once more to leave at "
                "once",
                flush=True,
            )


class _Signals:
    """SIGINT and SIGTERM call `handler` inside the block."""

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
    """One stream of randomness for each (seed, step, rank)."""
    return (
        seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB
    ) % 2**63


def _brief(numbers: list[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:8])
    return shown + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
