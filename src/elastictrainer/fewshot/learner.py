"""One network, one set of images, one method after another: plan for a task, adapt, be judged, forget."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from elastictrainer.backward import BackwardPrices, Spent
from elastictrainer.data.episodes import Bank, Episode
from elastictrainer.errors import ConfigError
from elastictrainer.fewshot.heads import HEADS, Prototypes, Queries
from elastictrainer.fewshot.lite import lite_residuals
from elastictrainer.fewshot.methods import Ceilings, Method, Task
from elastictrainer.importance import elastic
from elastictrainer.importance.potential import Potential, fisher_potential
from elastictrainer.metrics.timing import synchronize
from elastictrainer.plan import Plan
from elastictrainer.profiling.layers import price_backward
from elastictrainer.runtime.adapt import Adapted, adapt
from elastictrainer.runtime.optimizers import make_optimizer
from elastictrainer.selection import affordable

__all__ = ["Learner", "Outcome", "Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How a task is learnt: optimizer steps, each over one view of every support image, `batch_size` at a time.

    The batch is what backward holds at once; the ceilings are for it, the head included. `head` is one of `HEADS`.
    """

    steps: int = 20
    lr: float = 1e-3
    optimizer: str = "adam"
    batch_size: int = 4
    seed: int = 0
    head: str = "prototypes"

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise ConfigError(f"head {self.head!r} is not one of {', '.join(HEADS)}")
        if self.steps < 1 or self.batch_size < 1 or not self.lr > 0:
            raise ConfigError(
                f"steps {self.steps} and batch size {self.batch_size} must be at least 1, lr {self.lr} above 0"
            )


@dataclass(frozen=True, slots=True)
class Outcome:
    """A task as a method solved it. `decide_s` is measuring and choosing, `steps_s` the steps; judging is not in."""

    method: str
    accuracy: float
    plan: Plan | None
    losses: tuple[float, ...]
    decide_s: float
    steps_s: float
    remembered_bytes: int = 0
    answers: Tensor | None = field(default=None, repr=False, compare=False)


class Learner:
    """Made once for a network and its images; `solve` puts the network back as it was, `learn` leaves it adapted."""

    def __init__(
        self, model: nn.Module, head: Prototypes, bank: Bank, *, settings: Settings, ceilings: Ceilings,
        scheme: Plan | None = None,
    ) -> None:  # fmt: skip
        self.model, self.head, self.bank = model.eval(), head, bank
        self.settings, self.ceilings, self.scheme = settings, ceilings, scheme
        self._fixed: dict[tuple[str, int], Plan | None] = {}
        self._open: dict[Ceilings, tuple[str, ...]] = {}
        self._lite: dict[float, BackwardPrices] = {}
        self._pristine = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    @cached_property
    def prices(self) -> BackwardPrices:
        """Of a batch of pseudo-queries. Depends on shapes alone, so any images do, and it is made once."""
        return self._price(bits=True)

    @cached_property
    def plain(self) -> BackwardPrices:
        """The same in plain PyTorch, whose ReLUs keep all they put out: what full training costs."""
        return self._price(bits=False)

    def _price(self, *, bits: bool) -> BackwardPrices:
        size = self.settings.batch_size
        images = self.bank.images(torch.arange(1).expand(size).numpy())
        labels = torch.zeros(size, dtype=torch.int64, device=images.device)
        prototypes = self.head.of(self.model, images[:1], labels[:1], 2)
        optimizer = make_optimizer(self.settings.optimizer, self.model.parameters(), lr=self.settings.lr)
        batch = Queries(images, labels, prototypes)
        return price_backward(self.model, self.head.loss, batch, optimizer=optimizer, bits=bits)

    def solve(self, method: Method, episode: Episode, index: int) -> Outcome:
        """Learn the task and forget it again."""
        try:
            return self.learn(method, episode, index)
        finally:
            self.model.load_state_dict(self._pristine)

    def learn(
        self, method: Method, episode: Episode, index: int, *, on_plan: Callable[[], None] = lambda: None
    ) -> Outcome:
        """Learn the task: plan (for methods that plan by the task), adapt, be judged on its queries.

        `on_plan` is called once there is a plan, before anything trains. What a method adds to the network (lite
        residual modules) is off again afterwards.
        """
        _ = self.prices, self.plain  # of the network, not of the task
        with self.extended(method):
            return self._learn(method, episode, index, on_plan)

    def extended(self, method: Method) -> AbstractContextManager[object]:
        """Inside, the network has what the method adds to it."""
        if not method.lite:
            return nullcontext()
        image = self.bank.images(np.zeros(1, dtype=np.int64))
        return lite_residuals(self.model, image, share=method.lite, seed=self.settings.seed)

    def _lite_prices(self, method: Method) -> BackwardPrices:
        """With the lite residual modules on that the method adds."""
        if method.lite not in self._lite:
            self._lite[method.lite] = self._price(bits=True)
        return self._lite[method.lite]

    def _learn(self, method: Method, episode: Episode, index: int, on_plan: Callable[[], None]) -> Outcome:
        support, labels = self.bank.images(episode.support), self._labels(episode.support_labels)
        if method.lite:
            self._lite_prices(method)
        synchronize(support.device)
        start = time.perf_counter()
        plan = self.plan(method, episode, index, support, labels)
        synchronize(support.device)
        decide_s = time.perf_counter() - start
        on_plan()
        done = self._adapt(plan, episode, index, support, labels, bits=method.bits)
        prototypes = done.answers
        if prototypes is None:
            prototypes = self.head.of(self.model, support, labels, episode.ways)
        queries = Queries(self.bank.images(episode.query), self._labels(episode.query_labels), prototypes)
        right = self.head.right(self.model, queries)
        return Outcome(
            method.name,
            right / len(episode.query),
            plan,
            done.losses,
            decide_s,
            done.steps_s,
            done.remembered_bytes,
            prototypes,
        )

    def plan(self, method: Method, episode: Episode, index: int, support: Tensor, labels: Tensor) -> Plan | None:
        """The method's plan for the task; one that does not look at the task is made once."""
        head = self._head_spent(episode.ways)
        key = (method.name, episode.ways if head.nbytes else 0)
        if key in self._fixed:
            return self._fixed[key]

        def batch() -> Queries:
            prototypes = self.head.of(self.model, support, labels, episode.ways)
            return Queries(self._views(episode, index, 0), labels, prototypes)

        def scores() -> dict[str, float]:
            optimizer = make_optimizer(self.settings.optimizer, self.model.parameters(), lr=self.settings.lr)
            names = self.prices.profile.names
            return elastic(self.model, optimizer, self.head.loss, [batch()], names=names)

        def potential() -> Potential:
            return fisher_potential(self.model, self.head.loss, [batch()], layers=self._within(ceilings))

        prices = self._lite_prices(method) if method.lite else self.prices if method.bits else self.plain
        ceilings = self.ceilings.less(head, self.prices.full.macs)
        task = Task(prices, ceilings, potential, scores, self.scheme)
        plan = method.plan(task)
        if plan is not None:
            spent = None if plan.backward is None else plan.backward + head
            plan = replace(plan, backward=spent, full_backward=self.plain.full + head)
        if method.once:
            self._fixed[key] = plan
        return plan

    def _within(self, ceilings: Ceilings) -> tuple[str, ...]:
        """The layers that these ceilings leave open, found once: no task could choose another."""
        if ceilings not in self._open:
            self._open[ceilings] = affordable(self.prices, memory=ceilings.memory, compute=ceilings.compute)
        return self._open[ceilings]

    def _head_spent(self, ways: int) -> Spent:
        """Of the linear head: its weights' gradient and state, and the unit features that it keeps."""
        if self.settings.head != "linear":
            return Spent(0, 0, 0, 0, 0)
        layer = self.model.get_submodule(self.head.head)
        width, item = int(layer.in_features), layer.get_parameter("weight").element_size()  # type: ignore[arg-type]
        numbers, batch = ways * width, self.settings.batch_size
        return Spent(
            batch * width * item, numbers * item, numbers * item * self.prices.state_copies, 0, batch * numbers
        )

    def _adapt(
        self, plan: Plan | None, episode: Episode, index: int, support: Tensor, labels: Tensor, *, bits: bool
    ) -> Adapted:
        settings = self.settings
        optimizer = make_optimizer(settings.optimizer, self.model.parameters(), lr=settings.lr)
        return adapt(
            self.model, self.head, plan, optimizer, support, labels, lambda step: self._views(episode, index, step),
            ways=episode.ways, steps=settings.steps, batch_size=settings.batch_size, bits=bits,
            linear=settings.head == "linear",
        )  # fmt: skip

    def _views(self, episode: Episode, index: int, step: int) -> Tensor:
        return self.bank.views(episode.support, index * self.settings.steps + step)

    def _labels(self, labels: object) -> Tensor:
        return torch.as_tensor(labels, device=self.bank.device)
