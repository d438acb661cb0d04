"""The methods that few-shot learning compares, each as the plan that it makes for a task under the same ceilings.

>>> for method in METHODS.values():
...     print(f"{method.name}: {method.description}")
none: prototypes of the network as it is; nothing trains
full: everything trains, whatever the ceilings
last: the last layer before the features trains
bias: biases alone train, for which no activation is kept
tinytl: biases and lite residual modules, a small path beside each block, train
adapterdrop: such modules beside the upper half of the blocks train, and nothing else
sparse_update: a scheme that was searched offline trains, the same for every task
elastic: the tensors worth most by gradient times update, by the exact solver
tinytrain: the layers and channels worth most by Fisher potential
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from elastictrainer.backward import BackwardPrices, Spent
from elastictrainer.budget import Budget, parse_bytes, parse_share
from elastictrainer.errors import BudgetError, ConfigError
from elastictrainer.fewshot.lite import LITE
from elastictrainer.importance.potential import Potential
from elastictrainer.plan import Plan
from elastictrainer.selection import select, select_channels

__all__ = ["METHODS", "Ceilings", "Method", "Task", "find_method"]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What backward may keep (`"1MiB"`) and compute (`"15%"` of full training's)."""

    memory: str | int | None = "1MiB"
    compute: str | float | None = "15%"

    def less(self, head: Spent, full_macs: int) -> Ceilings:
        """What a head that trains whatever happens leaves to the layers.

        Raises:
            BudgetError: nothing.
        """
        if not head.nbytes:
            return self
        memory, compute = self.memory, self.compute
        if memory is not None:
            memory = parse_bytes(memory) - head.nbytes
        if compute is not None:
            compute = parse_share(compute) * (1 + head.macs / full_macs) - head.macs / full_macs
        if (memory is not None and int(memory) <= 0) or (compute is not None and float(compute) <= 0):
            raise BudgetError(
                f"memory {self.memory} and compute {self.compute} are below what the linear head alone takes "
                f"({head}); raise them, or use head 'prototypes'",
                least=float(head.nbytes),
            )
        return Ceilings(memory, compute)


@dataclass(frozen=True, slots=True)
class Task:
    """What a method may look at. The two measurements cost what they cost, and are made only if asked for."""

    prices: BackwardPrices
    ceilings: Ceilings
    potential: Callable[[], Potential]
    scores: Callable[[], Mapping[str, float]]
    scheme: Plan | None = None


@dataclass(frozen=True, slots=True)
class Method:
    """`within`: it keeps the ceilings. `once`: its plan does not depend on the task.

    `bits`: ReLUs keep bits for it. Full training is left as PyTorch does it, which is what everyone compares with.
    `lite`: it adds lite residual modules to the network, beside this share of its blocks, those nearest the output.
    """

    name: str
    description: str
    paper: str
    plan: Callable[[Task], Plan | None]
    within: bool = True
    once: bool = False
    bits: bool = True
    lite: float = 0.0


def find_method(name: str) -> Method:
    """The method of this name; an unknown one is an error that suggests the nearest."""
    if name not in METHODS:
        close = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(METHODS)}"
        raise ConfigError(f"no few-shot method is called {name!r}; {hint}")
    return METHODS[name]


def plan_of(prices: BackwardPrices, trainable: set[str], *, note: str) -> Plan:
    """A plan that trains these tensors whole, with its cost."""
    profile = prices.profile
    spent = prices.spent(trainable)
    return Plan(
        trainable=tuple(name for name in profile.names if name in trainable),
        names=profile.names, step_s=math.nan, full_step_s=math.nan,
        peak_bytes=profile.memory.base_bytes + spent.nbytes, note=note,
        backward=spent, full_backward=prices.full,
    )  # fmt: skip


def _full(task: Task) -> Plan:
    return plan_of(task.prices, set(task.prices.profile.names), note="full")


def _last(task: Task) -> Plan:
    return plan_of(task.prices, set(task.prices.layers[-1].tensors), note="last")


def _bias(task: Task) -> Plan:
    graph = task.prices.profile.graph
    chosen = {t.name for t in graph.tensors if len(t.shape) == 1 and t.name.rpartition(".")[2] == "bias"}
    return plan_of(task.prices, chosen, note="bias")


def _adapters(task: Task) -> set[str]:
    return {name for name in task.prices.profile.names if f".{LITE}." in f".{name}"}


def _tinytl(task: Task) -> Plan:
    return plan_of(task.prices, {*_bias(task).trainable, *_adapters(task)}, note="tinytl")


def _adapterdrop(task: Task) -> Plan:
    return plan_of(task.prices, _adapters(task), note="adapterdrop")


def _tinytrain(task: Task) -> Plan:
    return select_channels(
        task.prices, task.potential(), memory=task.ceilings.memory, compute=task.ceilings.compute
    )  # fmt: skip


def _sparse_update(task: Task) -> Plan:
    if task.scheme is None:
        raise ConfigError("sparse_update trains a scheme that is searched offline; give one (--scheme FILE)")
    return task.scheme


def _elastic(task: Task) -> Plan:
    prices, ceilings = task.prices, task.ceilings
    profile = prices.by_macs
    share = 1.0 if ceilings.compute is None else parse_share(ceilings.compute)
    memory = None if ceilings.memory is None else profile.memory.base_bytes + parse_bytes(ceilings.memory)
    scores = task.scores()
    found = select(profile, scores, budget=Budget("ratio", share), memory=memory, pin=())
    chosen = set(found.trainable)
    # The solver's memory is a peak, in which gradients come as saved activations go; the ceiling is on all together.
    for name in sorted(chosen, key=lambda name: scores[name]):
        if ceilings.memory is None or prices.spent(chosen).nbytes <= parse_bytes(ceilings.memory):
            break
        chosen.discard(name)
    return replace(plan_of(prices, chosen, note="elastic"), score_values=found.score_values)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("none", "prototypes of the network as it is; nothing trains", "", lambda task: None, once=True),
        Method("full", "everything trains, whatever the ceilings", "", _full, within=False, once=True, bits=False),
        Method("last", "the last layer before the features trains", "", _last, within=False, once=True),
        Method(
            "bias",
            "biases alone train, for which no activation is kept",
            "Cai et al., TinyTL, NeurIPS 2020, without its lite residual modules",
            _bias,
            within=False,
            once=True,
        ),
        Method(
            "tinytl",
            "biases and lite residual modules, a small path beside each block, train",
            "Cai et al., TinyTL, NeurIPS 2020; its modules are not pretrained here",
            _tinytl,
            within=False,
            once=True,
            lite=1.0,
        ),
        Method(
            "adapterdrop",
            "such modules beside the upper half of the blocks train, and nothing else",
            "after Rücklé et al., AdapterDrop, EMNLP 2021, whose adapters are of transformers",
            _adapterdrop,
            within=False,
            once=True,
            lite=0.5,
        ),
        Method(
            "sparse_update",
            "a scheme that was searched offline trains, the same for every task",
            "Lin et al., On-Device Training Under 256KB Memory, NeurIPS 2022",
            _sparse_update,
            once=True,
        ),
        Method(
            "elastic",
            "the tensors worth most by gradient times update, by the exact solver",
            "Huang et al., ElasticTrainer, MobiSys 2023",
            _elastic,
        ),
        Method(
            "tinytrain",
            "the layers and channels worth most by Fisher potential",
            "Kwon et al., TinyTrain, ICML 2024",
            _tinytrain,
        ),
    )
}
