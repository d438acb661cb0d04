"""Plan: which tensors train, what that is predicted to cost, and why. Immutable, JSON, hashable."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from elastictrainer.budget import Budget, format_bytes, format_seconds
from elastictrainer.errors import ConfigError

if TYPE_CHECKING:
    from elastictrainer.backward import Spent
    from elastictrainer.profiling.profile import Profile
    from elastictrainer.why import Why

__all__ = ["Difference", "Plan"]

FORMAT = 1
_STRIP_COLUMNS = 100
_BLOCK_TENSORS = 48


@dataclass(frozen=True)
class Plan:
    """The answer: which tensors train. Made by `et.select`, or by `Plan.of` where nothing was chosen by a solver.

        plan = et.select(profile, scores, budget="0.5x")
        print(plan)                # the network as a strip, output side first
        plan.why("layer3.0.conv1.weight")
        Plan.from_json(plan.to_json()) == plan

    `trainable` and `names` (all tensors of the profile) stand in backward order, output side first. `scores` is aligned
    with `names` inside and a dictionary outside. What is claimed of the choice:

    - `gap`: no set of tensors within the same budgets scores more than `score / (1 - gap)`, by the profile's prices.
      Proven whatever `optimal` says; None for a plan that no solver made.
    - `optimal`: every set of operations that backward may have to reach was searched, none was left out for being one
      of too many, and `gap` is within what was asked for.

    `channels` names, for a tensor that trains in part, the output channels that do (rows of its first dimension); a
    trainable tensor that is not in it trains whole. A plan that was made without a clock has NaN seconds, and states
    its cost as `backward`, beside `full_backward` of everything trained.

    `id` names what is trained: plans that train the same tensors (and channels) share it, on every machine and at
    every price.
    """

    trainable: tuple[str, ...]
    names: tuple[str, ...]
    step_s: float
    full_step_s: float
    peak_bytes: int
    budget: Budget | None = None
    memory_bytes: int | None = None
    pinned: tuple[str, ...] = ()
    optimal: bool = False
    gap: float | None = None
    note: str = ""
    score_values: tuple[float, ...] | None = field(default=None, repr=False)
    channels: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    backward: Spent | None = None
    full_backward: Spent | None = None
    _profile: Profile | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, rows in self.channels.items():
            if name not in self.trainable:
                raise ConfigError(f"channels of {name!r}, which does not train: name it in trainable too")
            if not rows or any(a >= b for a, b in pairwise(rows)) or rows[0] < 0:
                raise ConfigError(f"channels of {name!r} must be some numbers from 0 up, each once and in order")

    @classmethod
    def of(cls, profile: Profile, names: Iterable[str], *, note: str = "") -> Plan:
        """A plan that trains these tensors, with its cost predicted and nothing claimed about the choice.

        Raises:
            ProfileError: a name that the profile does not know.
        """
        wanted = set(profile.graph.indices(names).tolist())
        trainable = tuple(name for k, name in enumerate(profile.names) if k in wanted)
        return cls(
            trainable=trainable,
            names=profile.names,
            step_s=profile.step_s(trainable),
            full_step_s=profile.full_step_s,
            peak_bytes=profile.peak_bytes(trainable),
            note=note,
            _profile=profile,
        )

    @property
    def timed(self) -> bool:
        """Whether the plan's seconds are known."""
        return not math.isnan(self.step_s)

    @property
    def ratio(self) -> float:
        """Predicted seconds of a step, as a share of a step with everything trained."""
        return self.step_s / self.full_step_s

    @property
    def scores(self) -> dict[str, float] | None:
        """The importance that the plan was made from."""
        return None if self.score_values is None else dict(zip(self.names, self.score_values))

    @property
    def score(self) -> float | None:
        """The importance of what is trained, summed."""
        scores = self.scores
        return None if scores is None else math.fsum(scores[name] for name in self.trainable)

    @cached_property
    def id(self) -> str:
        """Twelve hexadecimal digits that name what is trained."""
        parts = (f"{n}[{','.join(map(str, self.channels[n]))}]" if n in self.channels else n for n in self.trainable)
        return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:12]

    def __hash__(self) -> int:
        return int(self.id, 16)

    def __eq__(self, other: object) -> bool:
        # By what they state, since seconds that nobody measured are NaN and would equal nothing.
        return self.to_dict() == other.to_dict() if isinstance(other, Plan) else NotImplemented

    def diff(self, other: Plan) -> Difference:
        """What changes from this plan to the other."""
        mine, theirs = set(self.trainable), set(other.trainable)
        return Difference(
            started=tuple(name for name in other.trainable if name not in mine),
            stopped=tuple(name for name in self.trainable if name not in theirs),
            kept=tuple(name for name in other.trainable if name in mine),
            moved=tuple(n for n in other.trainable if n in mine and self.channels.get(n) != other.channels.get(n)),
            step_s=other.step_s - self.step_s,
            peak_bytes=other.peak_bytes - self.peak_bytes,
        )

    def why(self, name: str, profile: Profile | None = None) -> Why:
        """Why a tensor is in the plan or not: its score, its price now, and what it would displace.

        `profile` is needed only for a plan that was read from JSON, which holds no prices. Costs two predictions, and
        for a tensor that is out one more for each tensor that would have to leave.

        Raises:
            ProfileError: no such tensor.
            ConfigError: no profile to take the prices from.
        """
        from elastictrainer.why import explain

        prices = profile or self._profile
        if prices is None:
            raise ConfigError("a plan read from JSON holds no prices; give why() the profile that it was made from")
        return explain(self, prices, name)

    def to_dict(self) -> dict[str, Any]:
        data = {f.name: getattr(self, f.name) for f in fields(self) if not f.name.startswith("_")}
        data["budget"] = None if self.budget is None else asdict(self.budget)
        data["scores"] = data.pop("score_values")
        data["channels"] = {name: list(rows) for name, rows in self.channels.items()}
        for key in ("backward", "full_backward"):
            data[key] = None if data[key] is None else asdict(data[key])
        if not self.timed:
            data |= {"step_s": None, "full_step_s": None}
        lists = {key: list(value) for key, value in data.items() if isinstance(value, tuple)}
        return {"format": FORMAT, "id": self.id, "ratio": self.ratio if self.timed else None, **data, **lists}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        from elastictrainer.backward import Spent

        found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
        if found != FORMAT:
            raise ConfigError(
                f"not a plan of format {FORMAT} (found {found!r}); make it again with 'elastictrainer plan'"
            )
        try:
            told = {key: tuple(data[key]) for key in ("names", "trainable", "pinned")}
            if not all(isinstance(name, str) and name in told["names"] for some in told.values() for name in some):
                raise ValueError("tensors that are not among its names")
            if data["scores"] is not None and len(data["scores"]) != len(told["names"]):
                raise ValueError("a score is missing, or one too many")
            return cls(
                trainable=told["trainable"],
                names=told["names"],
                step_s=math.nan if data["step_s"] is None else float(data["step_s"]),
                full_step_s=math.nan if data["full_step_s"] is None else float(data["full_step_s"]),
                peak_bytes=int(data["peak_bytes"]),
                budget=None
                if data["budget"] is None
                else Budget(data["budget"]["kind"], float(data["budget"]["value"])),
                memory_bytes=None if data["memory_bytes"] is None else int(data["memory_bytes"]),
                pinned=told["pinned"],
                optimal=bool(data["optimal"]),
                gap=None if data["gap"] is None else float(data["gap"]),
                note=str(data["note"]),
                score_values=None if data["scores"] is None else tuple(map(float, data["scores"])),
                channels={name: tuple(map(int, rows)) for name, rows in dict(data.get("channels", {})).items()},
                backward=None if data.get("backward") is None else Spent(**data["backward"]),
                full_backward=None if data.get("full_backward") is None else Spent(**data["full_backward"]),
            )
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise ConfigError(f"damaged plan: {error!r}; make it again with 'elastictrainer plan'") from error

    @classmethod
    def from_json(cls, text: str) -> Plan:
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ConfigError(f"not a plan: {error}; make it again with 'elastictrainer plan'") from error
        return cls.from_dict(data)

    def __str__(self) -> str:
        limits = [str(self.budget)] if self.budget else []
        limits += [format_bytes(self.memory_bytes)] if self.memory_bytes else []
        part = f", {len(self.channels)} of them in part" if self.channels else ""
        allowed = f" ({' and '.join(limits)} allowed)" if limits else ""
        facts = [f"{len(self.trainable)} of {len(self.names)} tensors train{part}"]
        if self.backward is not None and self.full_backward is not None:
            share = self.backward.macs / max(self.full_backward.macs, 1)
            facts.append(f"{self.backward}, {share:.3g}x of full training's{'' if self.timed else allowed}")
        if self.timed:
            facts.append(f"{format_seconds(self.step_s)} a step, {self.ratio:.3g}x of full training{allowed}")
            facts.append(f"peak {format_bytes(self.peak_bytes)}")
        if self.gap is not None:
            facts.append(f"{'proven' if self.optimal else 'not proven, but'} within {self.gap:.2%} of the best")
        if self.note:
            facts.append(self.note)
        return "; ".join(facts) + "\n" + self.strip()

    def blocks(self) -> dict[str, tuple[str, ...]]:
        """All tensors by top-level block, output side first; a block of many tensors is given by its parts."""
        return _blocks(self.names)

    def strip(self) -> str:
        """The network from output to input, one character a tensor: `#` trains, `+` trains in part, `P` is
        pinned, `.` rests."""
        trainable, pinned = set(self.trainable), set(self.pinned)

        def mark(name: str) -> str:
            if name not in trainable:
                return "."
            return "+" if name in self.channels else "P" if name in pinned else "#"

        blocks = {block: "".join(map(mark, members)) for block, members in self.blocks().items()}
        line = "  ".join(f"{block} {marks}" for block, marks in blocks.items())
        if len(line) <= _STRIP_COLUMNS:
            return f"output | {line} | input"
        width = max(map(len, blocks))
        return "\n".join(["output", *(f"  {block.ljust(width)}  {marks}" for block, marks in blocks.items()), "input"])


@dataclass(frozen=True)
class Difference:
    """What changes from one plan to another; `step_s` and `peak_bytes` are what the other costs more.

    `moved` are those of `kept` that train in other channels.
    """

    started: tuple[str, ...]
    stopped: tuple[str, ...]
    kept: tuple[str, ...]
    step_s: float
    peak_bytes: int
    moved: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.started or self.stopped or self.moved)

    def __str__(self) -> str:
        if not self:
            return f"the same {len(self.kept)} tensors train"
        sign = "-" if self.step_s < 0 else "+"
        counts = f"{len(self.started)} start, {len(self.stopped)} stop, {len(self.kept)} stay"
        counts += f" ({len(self.moved)} in other channels)" if self.moved else ""
        seconds = "" if math.isnan(self.step_s) else f"; {sign}{format_seconds(abs(self.step_s))} a step"
        lines = [counts + seconds]
        lines += [f"+ {name}" for name in self.started] + [f"- {name}" for name in self.stopped]
        lines += [f"~ {name}" for name in self.moved]
        return "\n".join(lines)


def _blocks(names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    depth = dict.fromkeys(names, 1)
    while True:
        blocks: dict[str, list[str]] = {}
        for name in names:
            owner = name.split(".")[:-1] or [name]
            blocks.setdefault(".".join(owner[: depth[name]]), []).append(name)
        large = [
            members
            for block, members in blocks.items()
            if (len(members) > _BLOCK_TENSORS or len(blocks) == 1)
            and any(len(n.split(".")) - 1 > depth[n] for n in members)
        ]
        if not large:
            return {block: tuple(members) for block, members in blocks.items()}
        for members in large:
            for name in members:
                depth[name] += 1
