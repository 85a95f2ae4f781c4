"""All that a run must remember: weights, optimiser, averaged weights, step, place in the data. As tensors by name and one small dict."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tracformer.model import ConditionalModel, ModelConfig
from tracformer.renames import present_names, present_tensor_name
from tracformer.training.checkpoint import WEIGHTS, DamagedCheckpointError, Reader, Rows, Shard
from tracformer.training.config import OLD_KEYS
from tracformer.training.distributed import Ranks, local
from tracformer.training.optimizer import Optimizer


class State:
    def __init__(
        self,
        model: ConditionalModel,
        optimizer: Optimizer,
        ranks: Ranks,
        sharded: bool,
        ema: float,
        data: str,
        recipe: Mapping[str, Any] | None = None,
        take_changes: bool = False,
    ) -> None:
        """`recipe`: what a run goes on with unchanged, unless `take_changes`."""
        self.recipe, self.take_changes = dict(recipe or {}), take_changes
        self.earlier: list[dict[str, Any]] = []  # recipes that the run had before, each with the step up to which
        self.model, self.optimizer, self.ranks, self.sharded, self.decay, self.data = model, optimizer, ranks, sharded, ema, data
        self.parameters = dict(model.named_parameters())
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in self.parameters.items()}
        self.step = 0
        self.position = 0  # sequences of the stream already used
        self.best = float("inf")  # lowest validation perplexity so far
        self.cpu_seconds = 0.0  # processor time of the training steps, without validation and checkpoints
        self.average: dict[str, Tensor] = {}
        if ema:
            self.average = {name: local(p).detach().clone() for name, p in self.parameters.items()}

    def advance(self, sequences: int) -> None:
        self.step += 1
        self.position += sequences
        decay = min(self.decay, (1 + self.step) / (10 + self.step))  # the random weights of the start are soon forgotten
        for name, mean in self.average.items():
            mean.lerp_(local(self.parameters[name]).detach(), 1.0 - decay)

    # ---- to a checkpoint

    def describe(self) -> dict[str, Any]:
        best = None if self.best == float("inf") else self.best
        return {
            "step": self.step,
            "position": self.position,
            "best": best,
            "cpu_seconds": round(self.cpu_seconds, 3),
            "ema": self.decay,
            "optimizer": self.optimizer.name,
            "data": self.data,
            "model": self.model.config.to_dict(),
            "recipe": self.recipe,
            "earlier": self.earlier,
        }

    def shards(self) -> dict[str, Shard]:
        """By kind; empty on ranks that have nothing to write."""
        if not self.sharded and not self.ranks.first:
            return {}
        shards = {
            WEIGHTS: self._shard({name: local(p) for name, p in self.parameters.items()}),
            "optimizer": self._shard(self.optimizer.tensors(self.names)),
        }
        if self.average:
            shards["ema"] = self._shard(self.average)
        return shards

    def _shard(self, tensors: dict[str, Tensor]) -> Shard:
        rows = {}
        for name in tensors:
            shape = tuple(self.parameters[_parameter_name(name, self.parameters)].shape)
            start, stop = self.ranks.local_rows(shape[0]) if self.sharded else (0, shape[0])
            rows[name] = Rows(shape, start, stop)
        return Shard(tensors, rows)

    # ---- from a checkpoint

    def load(self, reader: Reader) -> None:
        saved, mine = _saved_config(reader, self.model.config), self.model.config.to_dict()
        if different := [key for key in mine if _plain(mine[key]) != _plain(saved.get(key)) and key != "dropout"]:
            told = ", ".join(f"{key} was {saved.get(key)!r} and is now {mine[key]!r}" for key in different)
            raise ValueError(
                f"the run in {reader.path.parent.parent} has another model: {told}; use another run folder, or the old settings"
            )
        if (before := reader.state.get("optimizer", "adamw")) != self.optimizer.name:
            raise ValueError(
                f"the run in {reader.path.parent.parent} was trained with optimizer.name={before}, and {self.optimizer.name} cannot go on "
                f"from its state; use another run folder, or optimizer.name={before}"
            )
        if reader.state.get("data", self.data) != self.data:
            raise ValueError(
                f"the run in {reader.path.parent.parent} was trained on other data, or on the same tokenised otherwise; use another run "
                f"folder, with init={reader.path.parent.parent / 'model'} to go on from its weights, or the old data"
            )
        self._compare_recipes(reader)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                local(parameter).copy_(self._rows(reader, WEIGHTS, name))
        self.step, self.position = reader.state["step"], reader.state["position"]
        self.cpu_seconds = reader.state.get("cpu_seconds", 0.0)
        self.best = float("inf") if reader.state["best"] is None else reader.state["best"]
        if self.step:
            tensors = {name: self._rows(reader, "optimizer", name) for name in self.optimizer.tensor_names(self.names)}
            self.optimizer.restore(self.names, tensors, self.step)
        if self.average:
            source = "ema" if reader.has("ema") else WEIGHTS
            for name, mean in self.average.items():
                mean.copy_(self._rows(reader, source, name))

    def _compare_recipes(self, reader: Reader) -> None:
        before = present_names(reader.state.get("recipe", {}), OLD_KEYS)
        self.earlier = list(reader.state.get("earlier", []))
        different = [key for key in before if key in self.recipe and _plain(self.recipe[key]) != _plain(before[key])]
        if not different:
            return
        if not self.take_changes:
            told = ", ".join(f"{key} was {before[key]!r} and is now {self.recipe[key]!r}" for key in different)
            raise ValueError(
                f"the run in {reader.path.parent.parent} is at step {reader.state['step']} with another recipe: {told}; use another "
                "run=FOLDER, the old settings, or changes=take to go on with the new ones from here"
            )
        self.earlier.append({"until": reader.state["step"], **{key: before[key] for key in different}})

    def _rows(self, reader: Reader, kind: str, name: str) -> Tensor:
        parameter = self.parameters[_parameter_name(name, self.parameters)]
        start, stop = self.ranks.local_rows(parameter.shape[0]) if self.sharded else (0, parameter.shape[0])
        rows = reader.rows(kind, self._saved_name(reader, kind, name), start, stop)
        if rows.shape != (stop - start, *parameter.shape[1:]):
            raise DamagedCheckpointError(
                f"{reader.path.name}: {name} has shape {tuple(rows.shape)}, expected {(stop - start, *parameter.shape[1:])}"
            )
        return rows

    def _saved_name(self, reader: Reader, kind: str, name: str) -> str:
        """Return the name under which a tensor was saved, which may be one of an older version."""
        renames = self.model.config.old_tensor_names
        if not renames:
            return name
        for saved in reader.names(kind):
            moment, parameter = saved.split(".", 1) if kind == "optimizer" else ("", saved)
            present = present_tensor_name(parameter, renames)
            if name == (f"{moment}.{present}" if moment else present):
                return saved
        return name

    # ---- whole weights

    def full_weights(self) -> dict[str, Tensor]:
        """Every tensor whole; a collective call where weights are sharded."""
        return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for name, p in self.parameters.items()}

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """The averaged weights in place of the trained ones, where there are any."""
        if not self.average:
            yield
            return
        kept = {name: local(p).detach().clone() for name, p in self.parameters.items()}
        self._put(self.average)
        try:
            yield
        finally:
            self._put(kept)

    def _put(self, tensors: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in tensors.items():
                local(self.parameters[name]).copy_(tensor)


def _parameter_name(name: str, parameters: dict[str, Any]) -> str:
    """`exp_avg.norm.weight` belongs to the parameter `norm.weight`."""
    return name if name in parameters else name.partition(".")[2]


def _saved_config(reader: Reader, config: ModelConfig) -> dict[str, Any]:
    """Return a checkpoint's model configuration under present names, with defaults of later fields."""
    saved: dict[str, Any] = reader.state["model"]
    try:
        return {key: _plain(value) for key, value in config.from_dict(saved).to_dict().items()}
    except ValueError:  # of another family
        return saved


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
