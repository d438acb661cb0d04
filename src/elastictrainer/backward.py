"""What the backward pass of a plan holds, computes and (if timed) takes, down to the channel."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastictrainer.budget import format_bytes
from elastictrainer.errors import ConfigError, ProfileError
from elastictrainer.profiling.profile import Lane, Profile

__all__ = ["BackwardPrices", "Clock", "Layer", "Spent"]

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Spent:
    """The backward pass of one plan on one batch.

    `saved_bytes` are kept by forward, `gradient_bytes` and `state_bytes` are those of what trains, `copy_bytes` the
    copies of the weights of channels that train in part; `macs` are multiply-adds of convolutions and linear layers.
    """

    saved_bytes: int
    gradient_bytes: int
    state_bytes: int
    copy_bytes: int
    macs: int

    @property
    def nbytes(self) -> int:
        """All that the memory ceiling is about."""
        return self.saved_bytes + self.gradient_bytes + self.state_bytes + self.copy_bytes

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.saved_bytes + other.saved_bytes,
            self.gradient_bytes + other.gradient_bytes,
            self.state_bytes + other.state_bytes,
            self.copy_bytes + other.copy_bytes,
            self.macs + other.macs,
        )

    def __str__(self) -> str:
        return f"{format_bytes(self.nbytes)} and {self.macs / 1e6:.4g}M multiply-adds backward"


@dataclass(frozen=True, slots=True)
class Layer:
    """A convolution or linear layer whose output channels can train apart.

    `channels` of the output in `groups`, `macs` forward on the batch (backward costs as many for the weight and as many
    for the input), `input_bytes` that the weight's gradient needs, `item_bytes` of one number.
    """

    name: str
    weight: str
    bias: str | None
    channels: int
    groups: int
    row_numel: int
    item_bytes: int
    macs: int
    input_bytes: int

    @property
    def params(self) -> int:
        return self.channels * self.row_numel + (self.channels if self.bias else 0)

    @property
    def row_bytes(self) -> int:
        """The weights of one output channel, its bias included."""
        return (self.row_numel + (self.bias is not None)) * self.item_bytes

    @property
    def tensors(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def touched(self, channels: Sequence[int]) -> int:
        """How many groups of the input the gradient of these output channels needs."""
        per_group = self.channels // self.groups
        return len({channel // per_group for channel in channels})


@dataclass(frozen=True, eq=False)
class Clock:
    """What steps take on one device. Made by `time_backward`.

    `profile` prices tensors that train whole, ReLUs keeping bits. `rows` are measured: by weight, for each share of
    `shares`, the seconds of the weight's gradient in so many of its channels over those of the whole one.
    `full_step_s` is a step of everything in plain PyTorch.
    """

    profile: Profile
    shares: tuple[float, ...]
    rows: Mapping[str, tuple[float, ...]]
    full_step_s: float

    def ratio(self, weight: str, share: float) -> float:
        """What the gradient of this share of a weight's channels takes of the whole one's; between shares, a line."""
        if share >= 1 or weight not in self.rows:
            return 1.0
        return float(np.interp(share, self.shares, self.rows[weight]))

    def step_s(self, names: Iterable[str], shares: Mapping[str, float]) -> float:
        """Seconds of a step in which these tensors train, those in `shares` in part.

        The optimizer's part is taken as that of whole tensors, so this errs on the side of too long. Rows save no
        launches: the lane of a GPU's host is left as it is.
        """
        index = self.profile.graph.index
        lanes = []
        for lane in self.profile.lanes:
            own = lane.dw_s.copy()
            for weight, share in shares.items():
                own[index[weight]] *= self.ratio(weight, share)
            lanes.append(lane if lane.name == "launch" else replace(lane, dw_s=own))
        return replace(self.profile, lanes=tuple(lanes)).step_s(names)


@dataclass(frozen=True, eq=False)
class BackwardPrices:
    """The price list of backward by layer and channel. Made by `price_backward`; pure data, good on any machine.

    `profile` holds the graph and what each node keeps, without seconds; these are `clock`'s, if `time_backward` took
    them, and of one device. `state_copies` is how many numbers the optimizer keeps for each that trains. Everything is
    for one batch of the size that was traced.
    """

    profile: Profile
    layers: tuple[Layer, ...]
    state_copies: int
    batch_size: int
    clock: Clock | None = None

    @cached_property
    def by_weight(self) -> dict[str, Layer]:
        return {layer.weight: layer for layer in self.layers}

    @cached_property
    def full(self) -> Spent:
        """Everything trained."""
        return self.spent(self.profile.names)

    def spent(self, trainable: Iterable[str], channels: Mapping[str, Sequence[int]] | None = None) -> Spent:
        """What backward costs when these tensors train, those in `channels` only in these output channels.

        Saved storage that several operations need is counted once. A grouped layer that trains in some groups keeps a
        copy of these groups' input and not the whole.

        Raises:
            ProfileError: a tensor, or a layer of channels, that was not traced.
        """
        channels = channels or {}
        names = dict.fromkeys(trainable)
        self._check(names, channels)
        trained = self.profile.graph.indices(names)
        sliced = {w: rows for w, rows in channels.items() if w in self.by_weight and self.is_sliced(w, rows)}
        saved = self.profile.saved_bytes(names, without=sliced)
        for weight, rows in sliced.items():
            layer = self.by_weight[weight]
            saved += layer.input_bytes * layer.touched(rows) // layer.groups
        gradient = copies = 0
        for name in names:
            tensor = self.profile.graph.tensors[self.profile.graph.index[name]]
            rows_of = channels.get(name)
            nbytes = tensor.nbytes if rows_of is None else tensor.nbytes // tensor.shape[0] * len(rows_of)
            gradient += nbytes
            copies += nbytes if rows_of is not None else 0
        macs = sum(
            layer.macs * len(channels.get(layer.weight, range(layer.channels))) // layer.channels
            for layer in self.layers
            if layer.weight in names
        )
        macs += sum(self.layers[i].macs for i in np.flatnonzero(self.passing(trained)))
        return Spent(saved, gradient, gradient * self.state_copies, copies, int(macs))

    def step_s(self, trainable: Iterable[str], channels: Mapping[str, Sequence[int]] | None = None) -> float:
        """Seconds of a step of this plan; NaN where nothing was timed."""
        if self.clock is None:
            return math.nan
        given = (channels or {}).items()
        shares = {w: len(rows) / self.by_weight[w].channels for w, rows in given if w in self.by_weight}
        return self.clock.step_s(tuple(trainable), shares)

    def passing(self, trained: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Which layers hand a gradient on to their input when these tensors (by index) train."""
        reached = self.profile.graph.reached(trained)
        return np.asarray((self._feeds & reached).any(axis=1), dtype=np.bool_)

    @cached_property
    def fed_by(self) -> tuple[tuple[int, ...], ...]:
        """For each layer, the nodes of other modules that it hands gradients to."""
        graph = self.profile.graph
        inside: dict[str, set[int]] = {}
        for i, node in enumerate(graph.nodes):
            inside.setdefault(node.module, set()).add(i)
        fed = []
        for layer in self.layers:
            own = inside.get(layer.name, set())
            fed.append(tuple({m for n in own for m in graph.nodes[n].inputs} - own))
        return tuple(fed)

    @cached_property
    def _feeds(self) -> NDArray[np.bool_]:
        """`fed_by` as a table, layer by node."""
        table = np.zeros((len(self.layers), len(self.profile.graph.nodes)), dtype=np.bool_)
        for row, nodes in zip(table, self.fed_by):
            row[list(nodes)] = True
        return table

    @cached_property
    def by_macs(self) -> Profile:
        """The same prices for `et.select`: a clock that counts multiply-adds, so that a budget is a share of these.

        A layer's passing is charged to the operation that it hands its gradient to.
        """
        graph = self.profile.graph
        passing, own = np.zeros(len(graph.nodes)), np.zeros(len(graph.tensors))
        for layer, fed in zip(self.layers, self.fed_by):
            own[graph.index[layer.weight]] += layer.macs
            if fed:
                passing[min(fed)] += layer.macs
        nothing = np.zeros(len(graph.nodes))
        lane = Lane("multiply-adds", 0.0, 0.0, nothing, nothing, passing, own, np.zeros(len(graph.tensors)))
        state = np.asarray([tensor.nbytes * self.state_copies for tensor in graph.tensors], dtype=np.int64)
        return replace(self.profile, lanes=(lane,), memory=replace(self.profile.memory, state_bytes=state))

    def is_sliced(self, weight: str, rows: Sequence[int]) -> bool:
        """Whether training these rows keeps a part of the layer's input in a copy."""
        layer = self.by_weight[weight]
        return layer.groups > 1 and layer.touched(rows) < layer.groups

    def _check(self, names: Iterable[str], channels: Mapping[str, Sequence[int]]) -> None:
        known = {name for layer in self.layers for name in layer.tensors}
        wrong = [name for name in channels if name not in known]
        if wrong:
            raise ProfileError(f"{', '.join(wrong)}: not of a convolution or linear layer that the traced step ran")
        absent = [name for name in channels if name not in names]
        if absent:
            raise ConfigError(f"channels of {', '.join(absent)}, which does not train: name it in trainable too")

    def to_json(self) -> str:
        data = {
            "format": FORMAT,
            "profile": self.profile.to_dict(),
            "layers": [asdict(layer) for layer in self.layers],
            "state_copies": self.state_copies,
            "batch_size": self.batch_size,
        }
        if self.clock is not None:
            data["clock"] = _clock_data(self.clock)
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> BackwardPrices:
        try:
            data: dict[str, Any] = json.loads(text)
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']!r}")
            return cls(
                Profile.from_dict(data["profile"]),
                tuple(Layer(**layer) for layer in data["layers"]),
                data["state_copies"],
                data["batch_size"],
                _clock(data.get("clock")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProfileError(f"damaged prices of backward: {error!r}; take them again with price_backward") from error


def _clock_data(clock: Clock) -> dict[str, Any]:
    return {
        "profile": clock.profile.to_dict(), "shares": clock.shares, "rows": dict(clock.rows),
        "full_step_s": clock.full_step_s,
    }  # fmt: skip


def _clock(data: dict[str, Any] | None) -> Clock | None:
    if data is None:
        return None
    rows = {name: tuple(values) for name, values in data["rows"].items()}
    return Clock(Profile.from_dict(data["profile"]), tuple(data["shares"]), rows, data["full_step_s"])
