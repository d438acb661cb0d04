"""Elastic: profile once, then again and again probe, select and apply, so that the run meets its budget."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastictrainer.budget import Budget
from elastictrainer.errors import CheckpointError, ConfigError, DataError, TrainingError
from elastictrainer.importance import find_importance
from elastictrainer.plan import Plan
from elastictrainer.policies import Policy, find_policy
from elastictrainer.profiling.profile import Profile
from elastictrainer.runtime.apply import Applied, apply, unwrap
from elastictrainer.runtime.compilation import Compilations
from elastictrainer.runtime.events import new_event, predicted_ratio, rebuilt_so_far
from elastictrainer.runtime.interval import SIMILAR, Interval, Place, similarity
from elastictrainer.runtime.lookahead import Lookahead
from elastictrainer.runtime.pricing import check_given, effort_for, take_prices
from elastictrainer.runtime.probe_batches import GradientFrom, ProbeBatches
from elastictrainer.runtime.ranks import from_first_rank, ranks
from elastictrainer.runtime.steering import Steering
from elastictrainer.runtime.untouched import untouched
from elastictrainer.selection import Pin

__all__ = ["Elastic"]

Batch = TypeVar("Batch")
LossFn = Callable[[nn.Module, Any], Tensor]
FORMAT = 1


class Elastic:
    """Which tensors are worth training now, within a budget, decided again every `interval`.

        elastic = Elastic(model, optimizer, loss_fn, budget="0.5x")
        for epoch in range(12):
            for batch in elastic.epoch(loader):      # re-plans when due; plain iteration otherwise
                loss = loss_fn(model, batch)
                loss.backward(); optimizer.step(); optimizer.zero_grad()

    Nothing happens in the constructor: the model is profiled on the first batch, by when the optimizer, the device and
    everything else are as they will be used. The optimizer must hold every tensor that may ever train; its param groups
    are never edited.

    Args:
        loss_fn: `loss_fn(model, batch)` -> scalar tensor, as in training; autocast, if any, lives inside it.
        budget: `"0.5x"`: a step may take half of a full one. `"12ms"`: a step may take that long.
        policy: a name of `et.policies.POLICIES` or a `Policy`.
        importance: a name of `et.importance.IMPORTANCES`; `None` for the policy's own.
        interval: epochs (3, as published; fractions are fine), `"500steps"`, or `"auto"`: probe at every epoch and
            re-plan when the cosine similarity of the scores to those of the standing plan is under 0.8.
        pin: tensors that always train: `"head"`, names, patterns, or a test of the name.
        probe_batches: importance is measured on the next so many batches of the loader, which are then trained on as
            usual: none is lost or drawn twice. They are held in memory meanwhile.
        gradient_from: where importance takes its gradient from: `"same"`, the batches that make the update; `"other"`,
            as many that come after them, which are trained on as usual, too; or a loader of held-out data, from which
            as many batches are drawn anew for every probe. See `docs/method/importance.md`.
        memory: a ceiling for what a step holds, as in `"800MiB"`.
        bn, resting_state: see `et.apply`.
        profile: a `Profile`, or the path of one; otherwise it is taken, or found in the folder `cache`.
        deterministic: decide on nothing that is timed while running (feedback off).
        feedback: let measured step times correct the predictions, so that the run as a whole meets its budget.
        total_steps: how long the run will be, if known: the last plan then aims at the end of the run.
        scaler: the GradScaler of the loop, if it has one.
        on_plan: called with a plain dict at every new plan.
        around: opened around every decision; what measures the training (memory, say) can look away meanwhile.

    Costs: a profile once (100 full steps, or half a percent of the run where `total_steps` says how long it will be),
    and at every re-plan `probe_batches` full steps (twice that, unless the gradient is from the same batches), a few
    forward passes and some milliseconds of selection; in
    between, a clock read a step. `stats` has the seconds of each.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFn,
        *,
        budget: str | float | Budget = "0.5x",
        policy: str | Policy = "elastic",
        importance: str | None = "elastic",
        interval: str | float | Interval = 3,
        pin: Pin = "head",
        probe_batches: int = 6,
        gradient_from: GradientFrom = "same",
        memory: str | int | None = None,
        bn: Literal["frozen", "track", "with_owner"] = "frozen",
        resting_state: Literal["keep", "drop", "offload"] = "keep",
        profile: Profile | str | Path | None = None,
        cache: str | Path | None = None,
        deterministic: bool = False,
        feedback: bool = True,
        seed: int = 0,
        total_steps: int | None = None,
        scaler: Any | None = None,
        clock: Callable[[], float] = time.perf_counter,
        on_plan: Callable[[dict[str, Any]], None] | None = None,
        around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.policy = find_policy(policy)
        self.budget = Budget.parse(budget) if self.policy.within_budget else None
        self.importance = find_importance(self.policy.importance or importance or "elastic")
        self.interval = Interval.parse(interval)
        self.pin, self.memory = pin, memory
        self.seed, self.scaler, self.cache, self.on_plan, self._around = seed, scaler, cache, on_plan, around
        self.profile: Profile | None = Profile.load(profile) if isinstance(profile, (str, Path)) else profile
        self.plan: Plan | None = None
        self.scores: dict[str, float] | None = None
        self.place = Place()
        self.overhead_s = dict.fromkeys(("profile", "probe", "select", "apply", "forward"), 0.0)
        self.history: list[dict[str, Any]] = []
        self._bn, self._resting_state = bn, resting_state
        self._applied: Applied | None = None
        self.shrinking = False
        """Set by who rebuilds the network where the policy says that it shrinks: `et.fit`."""
        self.captured = False
        """Set by who records steps once and replays them: `et.fit`. Prices are then of such steps."""
        self._reprice = False
        self._rebuilt = 0
        self._stood = 0
        self._loaded = False
        self._paused_at: float | None = None
        self._device = next((p.device for p in unwrap(model).parameters()), torch.device("cpu"))
        self.probe_batches = ProbeBatches(gradient_from, count=probe_batches, seed=seed, device=self._device)
        self.probe_batches.check(self.importance if self.policy.needs_scores else None)
        self._clock = clock
        self._compilations = Compilations()
        self._steering = Steering(
            # Ranks that time themselves would each decide something else, so feedback is a single process's.
            enabled=feedback and not deterministic and self.policy.replans and ranks() == 1,
            # A network that shrinks makes its forward pass faster: that would be taken for a faster machine.
            timed=not deterministic and ranks() == 1 and not self.policy.shrinks,
            budget=self.budget,
            overlapping=self._device.type != "cpu",
            total_steps=total_steps,
        )

    # -- the loop ----------------------------------------------------------------------------------------------------

    def epoch(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of one epoch, each to be trained on before the next is asked for; re-plans when due.

        An epoch that the loop leaves early (`break`) is over; the rest of one that a loaded state was in goes on.

        Raises:
            DataError: the loader gave no batch at all.
            BudgetError: no plan fits; the least feasible budget is stated.
        """
        if self.policy.shrinks and not self.shrinking:
            raise ConfigError(
                f"policy {self.policy.name!r} rebuilds the network as it trains, which only et.fit does; use that"
            )
        if self.place.epoch_step and not self._loaded:  # the last one was left at a `break`: this is another
            self.place.end_epoch()
        self._loaded = False
        ahead = Lookahead(loader, clock=self._clock)
        with contextlib.suppress(TypeError):
            self._steering.steps_per_epoch = len(loader)  # type: ignore[arg-type]  # what has no length raises
        window = self._steering.window
        window.open(self._now())
        try:
            while True:
                if self.plan is not None and self._applied is None:  # loaded from a state, and not yet on the model
                    self._stand()
                if self._due():
                    self._replan(ahead)
                held = ahead.held
                batch = next(ahead, _END)
                if batch is _END:
                    break
                window.waited(ahead.waited_s, already_excluded=held)
                # Counted when handed out: a state taken in the loop's body, after the step, is then up to date.
                self.place.step()
                yield batch  # type: ignore[misc]  # _END is gone
                window.step()
                if window.full:
                    self._close_window()
                    self._steer(batch)
        finally:
            self._close_window()
            window.shut()
        if self.place.epoch_step == 0:
            raise DataError("the loader gave no batch; an epoch of nothing would train nothing")
        self.place.end_epoch()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Work inside is not training (evaluation, checkpoints) and is not charged to the budget."""
        start, outer = self._now(), self._paused_at
        self._paused_at = start if outer is None else outer
        try:
            yield
        finally:
            self._paused_at = outer
            self._steering.window.exclude(self._now() - start)

    @property
    def epochs(self) -> int:
        """So many are over."""
        return self.place.epochs

    @property
    def steps(self) -> int:
        """Batches that were handed out."""
        return self.place.steps

    @property
    def plan_id(self) -> str:
        """Names what is trained: the plan, and how often the network under it was rebuilt."""
        assert self.plan is not None
        return f"{self.plan.id}-{self._rebuilt}" if self._rebuilt else self.plan.id

    @property
    def standing(self) -> Hashable:
        """Changes whenever a plan is put on the model."""
        return self._stood

    @property
    def replays(self) -> bool:
        """Whether steps may be recorded and replayed: this was asked for, and they are priced as such."""
        return self.captured and (self.profile is None or self.profile.captured)

    def replays_no_more(self) -> None:
        """Steps turned out not to be recordable: they are made as ever, and priced so before the next one."""
        self._reprice = self.replays
        self.captured = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Recording a step is no step's time."""
        with self.pause(), self._charge("record"):
            yield

    def rebuilt(self, *, smaller: bool) -> None:
        """After `undo`, within an epoch: the plan stands again, as a new event if the network has lost channels."""
        assert self.plan is not None
        if smaller:
            self._rebuilt += 1
            self._adopt(self.plan, reason="rebuilt")
        else:
            self._stand()

    def undo(self) -> None:
        """Restore the model's flags as they were before the first plan."""
        if self._applied is not None:
            self._applied.undo()
            self._applied = None

    def __enter__(self) -> Elastic:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _due(self) -> bool:
        if self.plan is None or self._reprice:
            return True
        if not self.policy.replans:
            return False
        return self.place.is_due(self.interval, self._steering.steps_per_epoch)

    def _replan(self, ahead: Lookahead[Any]) -> None:
        """Probe on the batches that come next; plan anew unless the scores are much the same (`interval="auto"`)."""
        self._close_window()  # its steps were of the plan that stands, not of the one that comes
        with self.pause(), self._around():
            draw, first, anew = self.probe_batches, self.plan is None, self._reprice
            batches = ahead.peek(draw.ahead if self.policy.needs_scores else min(2, draw.count))
            if not batches or (len(batches) < draw.least and not first):
                return  # the loader is at its end; whatever is due is due again at the next epoch's start
            self._steering.saw_wait(ahead.typical_wait_s)
            if anew:
                self.undo()
            self._price(batches[0])
            self.place.checked()
            if not first and not anew:
                self._time_forward(batches[0])
            scores = self._probe(batches)
            alike = similarity(scores, self.scores) if scores is not None and self.scores is not None else None
            if self.interval.kind == "auto" and alike is not None and alike >= SIMILAR:
                if anew:
                    self._stand()
                return
            self.scores = scores
            self.place.planned()
            self._adopt(self._choose(), reason="first" if first else "drift" if anew else "interval", similarity=alike)
            if first or anew:
                self._time_forward(batches[0])

    def _steer(self, batch: Any) -> None:
        """At the end of a window: is the run on its way to its budget? If not, choose again from the same scores."""
        steering, plan, profile = self._steering, self.plan, self.profile
        if plan is None or profile is None or not steering.takes_stock():
            return
        with self.pause(), self._around():
            self._time_forward(batch)
            if not steering.enabled:
                return
            if steering.wants_profile:
                self.undo()
                self._price(batch, anew=True)
                self._adopt(self._choose(), reason="drift")
                self._time_forward(batch)
            elif steering.wants_trim(profile, plan, horizon=self._horizon()):
                self._adopt(self._choose(), reason="trim")

    def _horizon(self) -> int:
        steering = self._steering
        return self.place.left(self.interval, steering.steps_per_epoch, total=steering.total_steps)

    # -- the parts, each timed ---------------------------------------------------------------------------------------

    def _price(self, batch: Any, *, anew: bool = False) -> None:
        if self.profile is None or anew or self._reprice:
            self._reprice = False
            with self._charge("profile"):
                self.profile = take_prices(
                    self.model, self.loss_fn, batch, self.optimizer, bn=self._bn, cache=None if anew else self.cache,
                    seed=self.seed, effort=self._effort(), limit_s=self._profile_limit_s(), captured=self.captured,
                )  # fmt: skip
            self._steering.profiled(self.profile, taken=True)
        elif self.plan is None:
            check_given(
                self.profile, self.model, self.loss_fn, batch, self.optimizer, bn=self._bn, captured=self.captured
            )
            self._steering.profiled(self.profile, taken=False)

    def _effort(self) -> int:
        """About how many full steps a profile may cost."""
        return effort_for(self._steering.total_steps, self.budget)

    def _profile_limit_s(self) -> float | None:
        """The most that taking a profile may take; None for as long as it does."""
        return None

    def _time_forward(self, batch: Any) -> None:
        """Time the forward pass, always with a plan on the model: norms and layers then run as they do in training."""
        if not self._steering.timed or self.replays:  # launched one by one, it would tell of the host
            return
        with self._charge("forward"), untouched(self.model), torch.no_grad():
            seconds = []
            for _ in range(12 if self._steering.pace.reference_s is None else 8):
                start = self._now()
                self.loss_fn(self.model, batch)
                seconds.append(self._now() - start)
        self._steering.pace.timed_forward(median(seconds[1:]))  # the first one warms up

    def _probe(self, batches: list[Any]) -> dict[str, float] | None:
        if not self.policy.needs_scores:
            return None
        assert self.profile is not None
        with self._charge("probe"):
            update, gradient = self.probe_batches.divided(batches, step=self.steps)
            try:
                scores: Mapping[str, float] = self.importance.fn(
                    self.model, self.optimizer, self.loss_fn, update, gradient_batches=gradient,
                    names=self.profile.names, scaler=self.scaler, seed=self.seed + 1_000_003 * len(self.history),
                )  # fmt: skip
            except TrainingError as error:
                raise TrainingError(f"in the probe before step {self.steps + 1}: {error}") from error
        if self.plan is not None and self.plan.channels:  # a probe lifts them, and they come to lie elsewhere
            self._stood += 1
        return from_first_rank(dict(scores))

    def _choose(self) -> Plan:
        assert self.profile is not None

        def plan(prices: Profile, budget: Budget | None) -> Plan:
            return self.policy.plan(prices, self.scores, budget=budget, pin=self.pin, memory=self.memory)

        with self._charge("select"):
            return self._steering.choose(self.profile, plan, horizon=self._horizon())

    def _adopt(self, plan: Plan, *, reason: str, similarity: float | None = None) -> None:
        self.plan = plan
        self._stand()
        event = new_event(
            plan, self.model, plan_id=self.plan_id, index=len(self.history), epoch=self.epochs, step=self.steps,
            reason=reason, similarity=similarity, machine=self._steering.pace.machine,
        )  # fmt: skip
        self.history.append(event)
        if self.on_plan is not None:
            self.on_plan({**event, "plan": plan.to_dict(), "scores": self.scores})

    def _stand(self) -> None:
        """Put the plan on the model and tell the account what its steps should cost."""
        assert self.plan is not None
        assert self.profile is not None
        self._stood += 1
        with self._charge("apply"):
            if self._applied is None:
                self._applied = apply(
                    self.model, self.plan, optimizer=self.optimizer, bn=self._bn, resting_state=self._resting_state
                )
            else:
                self._applied.update(self.plan)
        self._steering.stand(self.profile, self.plan)

    # -- time --------------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()

    @contextmanager
    def _charge(self, part: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self.overhead_s[part] = self.overhead_s.get(part, 0.0) + self._now() - start

    def _close_window(self) -> None:
        if self._steering.window.steps and self.profile is not None:
            steps, seconds = self._steering.close(self._now())
            self.history[-1]["steps"] += steps
            self.history[-1]["spent_s"] += seconds

    def _unaccounted(self) -> tuple[int, float]:
        """Steps of the open window, the one in progress included, and their seconds so far."""
        start = self._steering.window.start
        if start is None or not self.history:
            return 0, 0.0
        now = self._now() if self._paused_at is None else self._paused_at
        steps = self.steps - sum(event["steps"] for event in self.history)
        return steps, max(now - start - self._steering.window.excluded_s, 0.0)

    # -- what others read --------------------------------------------------------------------------------------------

    @property
    def ratio(self) -> float | None:
        """The share of full training that the steps so far have taken."""
        return self._steering.pace.ratio

    def resting_state_bytes(self) -> dict[str, int]:
        """The optimizer's state of tensors that rest now, by where it is."""
        return self._applied.state_bytes() if self._applied is not None else {}

    @property
    def stats(self) -> dict[str, Any]:
        """What the run has cost so far, against what was asked and predicted; plain types.

        `measured_ratio` is the seconds of the steps themselves over the seconds of as many full steps on the machine as
        it was; the seconds in `overhead_s` are the decision-making's and come on top. `compilations` are the graphs
        that `torch.compile` has built since this controller was made: at most a few a plan.
        """
        pace = self._steering.pace
        account = pace.account(self.budget)
        return {
            "policy": self.policy.name,
            "importance": self.importance.name if self.policy.needs_scores else None,
            "budget": str(self.budget) if self.budget else None,
            "steps": pace.steps,
            "spent_s": account.spent_s,
            "full_step_s": account.full_s / pace.steps if pace.steps else None,
            "step_s": account.spent_s / pace.steps if pace.steps else None,
            "predicted_ratio": predicted_ratio(self.history),
            "measured_ratio": pace.ratio,
            "machine": pace.machine,
            "compilations": self._compilations.count(),
            "overhead_s": dict(self.overhead_s),
            "plans": [dict(event) for event in self.history],
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on, in plain types that JSON can hold: the profile, the plan, scores and accounts.

        Take it after the optimizer's step or between epochs; the batch last handed out counts as trained on.
        """
        history = [dict(event) for event in self.history]
        steps, seconds = self._unaccounted()  # who goes on from here opens another window
        if steps:
            history[-1]["steps"] += steps
            history[-1]["spent_s"] += seconds
        return {
            "format": FORMAT,
            "policy": self.policy.name,
            **self.place.to_dict(),
            "profile": self.profile.to_dict() if self.profile else None,
            "plan": self.plan.to_dict() if self.plan else None,
            "scores": self.scores,
            "overhead_s": dict(self.overhead_s),
            "history": history,
            "steering": self._steering.state_dict(steps, seconds),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`. The plan is put on the model at the next batch, so the order in which model,
        optimizer and controller are loaded does not matter.

        Raises:
            CheckpointError: not a state of this controller, or one of another policy.
        """
        if state.get("format") != FORMAT:
            raise CheckpointError(f"not a controller's state of format {FORMAT} (found {state.get('format')!r})")
        if state["policy"] != self.policy.name:
            raise CheckpointError(
                f"the state is of policy {state['policy']!r}, and this controller's is {self.policy.name!r}"
            )
        self.undo()
        self._loaded = True
        self.place = Place.from_dict(state)
        self.profile = Profile.from_dict(state["profile"]) if state["profile"] else self.profile
        self.plan = Plan.from_dict(state["plan"]) if state["plan"] else None
        self.scores = dict(state["scores"]) if state["scores"] is not None else None
        self.overhead_s = dict(state["overhead_s"])
        self.history = [dict(event) for event in state["history"]]
        self._rebuilt = rebuilt_so_far(self.history)
        self._steering.load_state_dict(state["steering"])


_END = object()
