"""The grid of a comparison: workloads by methods by seeds, each method at a learning rate of its own from one grid.

Pure data. What a cell is called, where it is kept and what `elastictrainer train` is told for it are all decided here,
so that a comparison that was killed finds its cells again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from elastictrainer.budget import Budget
from elastictrainer.errors import ConfigError, ElasticTrainerError
from elastictrainer.importance import find_importance
from elastictrainer.policies import POLICIES, find_policy

__all__ = ["SHORTER", "Cell", "Grid", "Method", "Workload"]

SHORTER = "shorter"
"""Not a policy but a method: everything trains, for as many epochs as the budget pays for. It needs no code of its own,
and it is what every way of choosing tensors has to beat."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A network with its weights, and the images that it learns."""

    model: str
    data: str
    weights: str | None = None

    @property
    def name(self) -> str:
        data = self.data.rstrip("/") or self.data
        return f"{self.model.rpartition('/')[2]} on {data if ':' in data else Path(data).name or data}"


@dataclass(frozen=True, slots=True)
class Method:
    """A way to train: a policy, what it measures importance by, and its budget, where it has these."""

    policy: str
    importance: str | None = None
    budget: str | None = None
    shorter: bool = False

    @property
    def name(self) -> str:
        """
        >>> Method("elastic", "magnitude", "0.5x").name, Method("full", budget="0.5x", shorter=True).name
        ('elastic magnitude 0.5x', 'full shorter 0.5x')
        """
        own = None if self.importance in (self.policy, "elastic") else self.importance  # what is usual goes unsaid
        return " ".join(filter(None, (self.policy, "shorter" if self.shorter else None, own, self.budget)))

    @property
    def by_clock(self) -> bool:
        """Whether how much is trained hangs on how fast the machine is: beside others it would be trained less.

        >>> Method("adaptive", budget="0.5x").by_clock, Method("elastic", budget="0.5x").by_clock
        (True, False)
        """
        return self.policy == "adaptive" or (self.budget is not None and Budget.parse(self.budget).kind == "seconds")

    def epochs(self, whole: int) -> int:
        """Passes over the data where others make `whole`: rounded down, so that the budget is kept.

        >>> Method("full", budget="0.7x", shorter=True).epochs(10), Method("elastic", budget="0.5x").epochs(12)
        (7, 12)
        """
        if not self.shorter or self.budget is None:
            return whole
        return max(1, int(Budget.parse(self.budget).value * whole + 1e-9))


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: a trial of a learning rate, judged on validation alone, or a final one."""

    workload: Workload
    method: Method
    lr: float
    seed: int
    epochs: int
    stage: Literal["rate", "final"]
    folder: Path

    @property
    def name(self) -> str:
        what = "" if self.stage == "final" else ", trial of the rate"
        return f"{self.workload.name}: {self.method.name}, lr {self.lr:g}, seed {self.seed}{what}"

    def arguments(self) -> list[str]:
        """What `elastictrainer train` is told besides the options that all cells share."""
        method = self.method
        told: dict[str, Any] = {
            "--model": self.workload.model,
            "--weights": self.workload.weights,
            "--data": self.workload.data,
            "--policy": method.policy,
            "--importance": method.importance,
            "--budget": None if method.shorter else method.budget,
            "--lr": f"{self.lr:g}",
            "--seed": self.seed,
            "--epochs": self.epochs,
            "--out": self.folder,
        }
        words = [str(word) for option, value in told.items() if value is not None for word in (option, value)]
        return [*words, "--resume", *(() if self.stage == "final" else ("--no-test",))]


@dataclass(frozen=True, slots=True)
class Grid:
    """Everything that is to be run. `Grid.of` makes one from names and refuses, at once, whatever cannot be right."""

    workloads: tuple[Workload, ...]
    methods: tuple[Method, ...]
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    epochs: int
    tune_epochs: int

    @classmethod
    def of(
        cls,
        *,
        models: Sequence[str],
        data: Sequence[str],
        weights: Sequence[str] = (),
        policies: Sequence[str],
        importances: Sequence[str] = ("elastic",),
        budgets: Sequence[str] = ("0.5x",),
        rates: Sequence[str | float],
        seeds: Sequence[str | int] = (0,),
        epochs: int,
        tune_epochs: int | None = None,
    ) -> Grid:
        """The grid of these names; a name given twice counts once.

        Importances and budgets multiply only the policies that look at them: `full` is one method whatever the budgets.

        Raises:
            ConfigError: with everything that is wrong in one line.
        """
        wrong: list[str] = []

        def read(parse: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
            found = []
            for value in dict.fromkeys(values):
                try:
                    found.append(parse(value))
                except ElasticTrainerError as error:
                    wrong.append(str(error))
            return found

        read(_model, models)
        read(_images, data)
        read(find_importance, importances)
        chosen = read(_policy, policies)
        limits = [str(budget) for budget in read(Budget.parse, budgets)]
        tried, starts = read(_rate, rates), read(_seed, seeds)
        for what, values in (("model", models), ("data", data), ("policy", policies), ("lr", rates), ("seed", seeds)):
            if not values:
                wrong.append(f"no {what} was given")
        if len(weights) not in (0, 1, len(models)):
            wrong.append(f"{len(weights)} weights for {len(models)} models; give one for all, or one for each")
        if tune_epochs is not None and not 1 <= tune_epochs <= epochs:
            wrong.append(f"tune-epochs {tune_epochs} must be between 1 and epochs ({epochs})")
        if SHORTER in policies:
            wrong += [
                f"{SHORTER!r} makes fewer epochs, so it needs budgets that are shares of full training below 1 and "
                f"worth at least one epoch; {limit} of {epochs} epochs is not"
                for limit in limits
                if not _shortens(limit, epochs)
            ]
        if wrong:
            raise ConfigError("; ".join(wrong))
        of_each = list(weights) if len(weights) == len(models) else [*weights, None][:1] * len(models)
        return cls(
            workloads=tuple(dict.fromkeys(Workload(m, d, w) for m, w in zip(models, of_each) for d in data)),
            methods=tuple(dict.fromkeys(m for name in chosen for m in _methods(name, importances, limits))),
            rates=tuple(dict.fromkeys(tried)),
            seeds=tuple(dict.fromkeys(starts)),
            epochs=epochs,
            tune_epochs=tune_epochs or max(1, epochs // 3),
        )

    @property
    def tunes(self) -> bool:
        """Whether there is a learning rate to choose."""
        return len(self.rates) > 1

    def trials(self, workload: Workload) -> list[Cell]:
        """Every method at every rate for a third of the epochs, on the first seed; methods take turns."""
        if not self.tunes:
            return []
        first = self.seeds[0]
        return [
            self.cell(workload, method, rate, first, stage="rate") for rate in self.rates for method in self.methods
        ]

    def finals(self, workload: Workload, rates: Mapping[Method, float]) -> list[Cell]:
        """Every method that has a rate, seed by seed. Methods take turns, and another one begins at every seed: what
        slows the machine for a while, or heats it, then hits all alike."""
        cells = []
        for turn, seed in enumerate(self.seeds):
            start = turn % len(self.methods)
            order = [m for m in (*self.methods[start:], *self.methods[:start]) if m in rates]
            cells += [self.cell(workload, method, rates[method], seed, stage="final") for method in order]
        return cells

    def cell(
        self, workload: Workload, method: Method, rate: float, seed: int, *, stage: Literal["rate", "final"]
    ) -> Cell:
        epochs = method.epochs(self.epochs if stage == "final" else self.tune_epochs)
        last = f"{_slug(method.name)}-lr{rate:g}-s{seed}" + ("" if stage == "final" else "-trial")
        return Cell(workload, method, rate, seed, epochs, stage, Path("cells") / self.folder(workload) / last)

    def under(self, out: Path, cell: Cell) -> Cell:
        """The cell with its folder where the comparison is kept."""
        return replace(cell, folder=out / cell.folder)

    def folder(self, workload: Workload) -> str:
        """Of the workload's name; numbered where two workloads share one (`a/birds` and `b/birds`)."""
        name = _slug(workload.name)
        alike = [other for other in self.workloads if _slug(other.name) == name]
        return name if alike[0] == workload else f"{name}-{alike.index(workload) + 1}"


def _methods(name: str, importances: Sequence[str], budgets: Sequence[str]) -> list[Method]:
    if name == SHORTER:
        return [Method("full", None, budget, shorter=True) for budget in budgets]
    policy = POLICIES[name]
    measured = importances if policy.needs_scores and policy.importance is None else (None,)
    limits: Sequence[str | None] = budgets if policy.within_budget else (None,)
    return [Method(name, importance, budget) for importance in measured for budget in limits]


def _policy(name: str) -> str:
    return name if name == SHORTER else find_policy(name).name


def _model(name: str) -> None:
    from elastictrainer.data import model_inputs

    model_inputs(name)


def _images(name: str) -> None:
    """A folder that is there; whether its images can be read is found out by the first cell."""
    from elastictrainer.data.builtin import BUILTIN
    from elastictrainer.data.torchvision_sets import PREFIX

    if name != BUILTIN and not name.startswith(PREFIX) and not Path(name).expanduser().is_dir():
        raise ConfigError(f"data {name!r}: no such folder; give an image folder, 'builtin' or 'torchvision:NAME'")


def _rate(written: str | float) -> float:
    try:
        rate = float(written)
    except ValueError:
        raise ConfigError(f"lr {written!r} is no number") from None
    if not 0 < rate < float("inf"):
        raise ConfigError(f"lr {written} must be above 0 and finite")
    return rate


def _seed(written: str | int) -> int:
    try:
        seed = int(written)
    except ValueError:
        seed = -1
    if seed < 0:
        raise ConfigError(f"seed {written!r} is no whole number from 0 up")
    return seed


def _shortens(limit: str, epochs: int) -> bool:
    budget = Budget.parse(limit)
    return budget.kind == "ratio" and 1.0 / epochs <= budget.value + 1e-9 and budget.value < 1.0


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "_", text).strip("._") or "x"
