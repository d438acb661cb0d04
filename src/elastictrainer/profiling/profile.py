"""Profile: what the tensors of one model cost on one device, in seconds and bytes, and how sure of it we are."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastictrainer.budget import format_bytes, format_seconds
from elastictrainer.errors import ProfileError
from elastictrainer.graph import Graph

__all__ = ["Lane", "Memory", "Profile", "Residual", "Storage"]

FORMAT = 1
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Lane:
    """A clock that every step waits for: `"cpu"`; on CUDA `"launch"` (the host issuing work) and `"device"`, or
    `"launch"` and `"replay"` of steps that are recorded once and replayed.

    Per node: `forward_s`; `fused_s`, paid when the node is reached at all; `pass_s`, what the operations above it pay
    to hand it a gradient. Per tensor: `dw_s`, its gradient, and `opt_s`, its share of the optimizer's step. Every step
    pays `forward_total_s + overhead_s`. All figures are calibrated: their sums predict un-instrumented steps.
    """

    name: str
    forward_total_s: float
    overhead_s: float
    forward_s: Floats
    fused_s: Floats
    pass_s: Floats
    dw_s: Floats
    opt_s: Floats

    @property
    def fixed_s(self) -> float:
        """Paid by every step whatever is trained."""
        return self.forward_total_s + self.overhead_s

    @cached_property
    def reach_s(self) -> Floats:
        """Per node: the whole price of reaching it, which a trained tensor on it or deeper does."""
        return self.fused_s + self.pass_s

    @cached_property
    def train_s(self) -> Floats:
        """Per tensor: the whole price of training it, once its node is reached."""
        return self.dw_s + self.opt_s

    def step_s(self, reached: NDArray[np.bool_], trained: NDArray[np.intp]) -> float:
        # Rounded once, at the end: more to train is then never predicted to take less, not even by the last bit, and
        # plans of equal prices take equal seconds. Whoever feeds a plan's own seconds back as a budget relies on it.
        return math.fsum([self.fixed_s, *self.reach_s[reached].tolist(), *self.train_s[trained].tolist()])

    def to_dict(self) -> dict[str, Any]:
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Lane:
        plain: dict[str, Any] = {k: np.asarray(v, np.float64) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**plain)


@dataclass(frozen=True, slots=True)
class Storage:
    """One block of memory kept for backward: held while one of `nodes` is reached or one of `tensors` is trained."""

    nbytes: int
    nodes: tuple[int, ...]
    tensors: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Memory:
    """What a step holds: `base_bytes` always (parameters, buffers, the batch), the rest by what is trained.

    `workspace_bytes` is, per node, what lives only while it runs (the gradients it reads and writes); `state_bytes` is,
    per tensor, its optimizer state. `forward_bytes` is what the forward pass needs for a moment even where nothing is
    kept for backward: the peak of a plan that trains little.
    """

    base_bytes: int
    storages: tuple[Storage, ...]
    workspace_bytes: NDArray[np.int64]
    state_bytes: NDArray[np.int64]
    forward_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "base_bytes": self.base_bytes,
            "storages": [[s.nbytes, list(s.nodes), list(s.tensors)] for s in self.storages],
            "workspace_bytes": self.workspace_bytes.tolist(),
            "state_bytes": self.state_bytes.tolist(),
            "forward_bytes": self.forward_bytes,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Memory:
        return cls(
            base_bytes=data["base_bytes"],
            storages=tuple(Storage(n, tuple(nodes), tuple(tensors)) for n, nodes, tensors in data["storages"]),
            workspace_bytes=np.asarray(data["workspace_bytes"], dtype=np.int64),
            state_bytes=np.asarray(data["state_bytes"], dtype=np.int64),
            forward_bytes=int(data.get("forward_bytes", 0)),  # profiles of before it was measured
        )


@dataclass(frozen=True, slots=True)
class Residual:
    """How far predictions were from real steps of plans that the calibration had not seen, as shares of the step."""

    median: float
    p95: float
    plans: int

    def __str__(self) -> str:
        return f"{self.median:.1%} median, {self.p95:.1%} at the 95th percentile ({self.plans} plans)"


@dataclass(frozen=True, eq=False)
class Profile:
    """The price list of a model on a device. Made by `et.profile`; pure data, good on any machine.

    `context` records everything that the figures depend on (device, torch, threads, shapes, optimizer, ...).
    `data_s` is what a step waits for its batch, if it was measured.
    """

    graph: Graph
    lanes: tuple[Lane, ...]
    memory: Memory
    error: Residual
    context: dict[str, Any] = field(default_factory=dict)
    data_s: float = 0.0

    @property
    def captured(self) -> bool:
        """Whether these are the prices of steps that are recorded once and replayed (CUDA graphs)."""
        return any(lane.name == "replay" for lane in self.lanes)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors, output side first."""
        return self.graph.names

    @cached_property
    def full_step_s(self) -> float:
        """A step with everything trained."""
        return self.step_s(self.names)

    @property
    def forward_s(self) -> float:
        """The forward pass alone."""
        return max(lane.forward_total_s for lane in self.lanes)

    @property
    def floor_s(self) -> float:
        """What a step costs before any tensor is trained."""
        return self.data_s + max(lane.fixed_s for lane in self.lanes)

    def step_s(self, names: Iterable[str]) -> float:
        """Seconds that a step takes when exactly these tensors are trained."""
        trained = self.graph.indices(names)
        reached = self.graph.reached(trained)
        return self.data_s + max(lane.step_s(reached, trained) for lane in self.lanes)

    def peak_bytes(self, names: Iterable[str]) -> int:
        """The most bytes that a step holds at once when exactly these tensors are trained."""
        return int(self.held_bytes(names).max())

    def held_bytes(self, names: Iterable[str]) -> NDArray[np.int64]:
        """Per node: the bytes that a step holds while backward runs it; 0 where it is not reached. Last: forward's."""
        trained = self.graph.indices(names)
        reached = self.graph.reached(trained)
        saved, release = self._saved(reached, trained)
        count = len(self.graph.nodes)
        freed = np.zeros(count + 1, dtype=np.int64)
        np.add.at(freed, release, saved)
        alive = int(saved.sum()) - np.concatenate(([0], np.cumsum(freed[:count])))[:count]
        grads = np.zeros(count, dtype=np.int64)
        for k in trained:
            grads[min(self.graph.hosts[k])] += self.graph.tensors[k].nbytes
        always = self.memory.base_bytes + int(self.memory.state_bytes[trained].sum())
        backward = np.where(reached, always + alive + np.cumsum(grads) + self.memory.workspace_bytes, 0)
        return np.append(backward, always + self.memory.forward_bytes)

    def saved_bytes(self, names: Iterable[str], *, without: Iterable[str] = ()) -> int:
        """Bytes kept from forward for backward when exactly these tensors are trained, shared storage counted once.

        Tensors in `without` train, but what their own gradients need is left out: it is kept in some other way.
        """
        trained = self.graph.indices(names)
        holding = np.setdiff1d(trained, self.graph.indices(without))
        storage, _, _, nbytes = self._holders
        held = np.zeros(len(nbytes), dtype=np.bool_)
        held[storage[self._active(self.graph.reached(trained), holding)]] = True
        return int(nbytes[held].sum())

    def _active(self, reached: NDArray[np.bool_], trained: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Which of `_holders` need their storage."""
        _, node, tensor, _ = self._holders
        is_trained = np.zeros(len(self.graph.tensors) + 1, dtype=np.bool_)  # the last entry stands for "no tensor"
        is_trained[trained] = True
        return np.where(tensor < 0, reached[node], is_trained[tensor]) if len(node) else np.zeros(0, dtype=np.bool_)

    def _saved(
        self, reached: NDArray[np.bool_], trained: NDArray[np.intp]
    ) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
        """Per storage: bytes if it is held at all, and the last node that needs it."""
        storage, node, _, nbytes = self._holders
        active = self._active(reached, trained)
        last = np.full(len(nbytes), -1, dtype=np.intp)
        np.maximum.at(last, storage[active], node[active])
        return np.where(last >= 0, nbytes, 0), np.where(last >= 0, last, len(self.graph.nodes))

    @cached_property
    def _holders(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp], NDArray[np.int64]]:
        rows = [(s, n, -1) for s, storage in enumerate(self.memory.storages) for n in storage.nodes]
        rows += [
            (s, max(self.graph.hosts[k]), k) for s, storage in enumerate(self.memory.storages) for k in storage.tensors
        ]
        table = np.asarray(rows, dtype=np.intp).reshape(-1, 3)
        sizes = np.asarray([s.nbytes for s in self.memory.storages], dtype=np.int64)
        return table[:, 0], table[:, 1], table[:, 2], sizes

    def with_data(self, data_s: float) -> Profile:
        """The same profile with the time that a step waits for its batch."""
        return replace(self, data_s=data_s)

    def with_kept_prefix(self, *, rebuilt: float, read_s: float = 0.0) -> Profile:
        """The same profile where what no trained tensor reaches is computed once and kept.

        Forward is then paid by depth, as backward is: an operation's own forward pass joins the price of reaching it.
        What is not reached costs `rebuilt` of its forward pass a step: how often it is run again, spread over the
        steps that use it (building counts), times what a pass of it costs by comparison. `read_s` is the fetching of
        what was kept. The same graph and the same kind of prices, so every solver takes it as it is.
        """
        if not rebuilt >= 0:
            raise ProfileError(f"rebuilt {rebuilt!r} is the share of steps that run the prefix; it cannot be negative")

        def kept(lane: Lane) -> Lane:
            below = float(lane.forward_s.sum())
            return replace(
                lane,
                forward_total_s=lane.forward_total_s - below + rebuilt * below + read_s,
                fused_s=lane.fused_s + max(1 - rebuilt, 0.0) * lane.forward_s,
            )

        return replace(self, lanes=tuple(map(kept, self.lanes)))

    def scaled(self, factor: float) -> Profile:
        """The same profile on a machine that has become this much slower (above 1) or faster."""
        if not factor > 0:
            raise ProfileError(f"a profile cannot be scaled by {factor!r}; the factor must be positive")

        def times(lane: Lane) -> Lane:
            return replace(lane, **{f.name: getattr(lane, f.name) * factor for f in fields(lane) if f.name != "name"})

        return replace(self, lanes=tuple(map(times, self.lanes)))

    def select_names(self, wanted: Callable[[str], bool]) -> tuple[str, ...]:
        return tuple(name for name in self.names if wanted(name))

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "context": self.context,
            "error": {"median": self.error.median, "p95": self.error.p95, "plans": self.error.plans},
            "data_s": self.data_s,
            "graph": self.graph.to_dict(),
            "lanes": [lane.to_dict() for lane in self.lanes],
            "memory": self.memory.to_dict(),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), separators=(",", ":"))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Profile:
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ProfileError(
                f"not a profile of format {FORMAT} (found {found!r}); take it again with 'elastictrainer profile'"
            )
        try:
            read = cls(
                graph=Graph.from_dict(data["graph"]),
                lanes=tuple(Lane.from_dict(lane) for lane in data["lanes"]),
                memory=Memory.from_dict(data["memory"]),
                error=Residual(**data["error"]),
                context=data["context"],
                data_s=data["data_s"],
            )
            _check(read)
            return read
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise ProfileError(f"damaged profile: {error!r}; take it again with 'elastictrainer profile'") from error

    @classmethod
    def from_json(cls, text: str) -> Profile:
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ProfileError(f"not a profile: {error}; take it again with 'elastictrainer profile'") from error
        read = cls.from_dict(data)
        if not read.lanes:  # one that was made for bytes alone is part of something else, which reads it itself
            raise ProfileError("a profile without a clock; take it again with 'elastictrainer profile'")
        return read

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile that was saved as JSON, on this machine or another."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ProfileError(f"cannot read profile {str(path)!r}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ProfileError(f"cannot read profile {str(path)!r}: it is no text, let alone JSON") from error
        return cls.from_json(text)

    def __str__(self) -> str:
        return (
            f"{len(self.names)} tensors, {len(self.graph.nodes)} operations; "
            f"full step {format_seconds(self.full_step_s)}, "
            f"forward {format_seconds(self.forward_s)}, peak {format_bytes(self.peak_bytes(self.names))}; "
            f"error {self.error}"
        )


def _check(profile: Profile) -> None:
    """Raise for what fits no graph: a file that was cut or edited is refused where it is read, not where it is used."""
    names, nodes, tensors = profile.names, len(profile.graph.nodes), len(profile.graph.tensors)
    if len(set(names)) < tensors or not all(isinstance(name, str) for name in names):
        raise ValueError("names of tensors that are no names, or not each once")
    if not (isinstance(profile.context, dict) and all(profile.graph.hosts)):
        raise ValueError("no context, or a tensor that hangs on no operation")
    priced: list[tuple[NDArray[Any], int]] = [
        (prices, nodes) for lane in profile.lanes for prices in (lane.forward_s, lane.fused_s, lane.pass_s)
    ]
    priced += [(prices, tensors) for lane in profile.lanes for prices in (lane.dw_s, lane.opt_s)]
    priced += [(profile.memory.workspace_bytes, nodes), (profile.memory.state_bytes, tensors)]
    for prices, count in priced:
        if prices.shape != (count,) or not (np.isfinite(prices) & (prices >= 0)).all():
            raise ValueError(f"prices that are not {count} finite numbers of at least 0")
    if profile.memory.forward_bytes < 0:
        raise ValueError(f"a forward pass that needs {profile.memory.forward_bytes} bytes")
    if profile.lanes and not (np.isfinite(profile.full_step_s) and profile.full_step_s > 0):
        raise ValueError(f"a full step of {profile.full_step_s!r} s")
    float(profile.data_s), str(profile.error), profile.peak_bytes(names)  # everything else that is said of a profile


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value
