"""The controller of a run's budget: stages of training, each on a plan of its own, until the time is used."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from elastictrainer.budget import Budget, format_seconds
from elastictrainer.errors import BudgetError, DataError
from elastictrainer.policies.adaptive import ADAPTIVE, Stage, choose_stage, head_stage, worth
from elastictrainer.profiling.measure import BESIDES, LEAST_EFFORT
from elastictrainer.profiling.sketch import is_sketch, least_profile_s, sketch
from elastictrainer.profiling.trace import LossFn
from elastictrainer.runtime.controller import Elastic
from elastictrainer.runtime.ending import Ending
from elastictrainer.runtime.features import Features, Keep
from elastictrainer.runtime.passes import Pass, pass_over
from elastictrainer.runtime.ranks import ranks

__all__ = ["Adaptive"]

PROFILE_SHARE = 0.5  # of a deadline at most goes into finding out what a step costs
PROBE_SHARE = 0.1  # of the time left at most goes into a probe, whose batch costs about a full step
SHORT_SHARE = 0.05  # of the budget: where a profile would take more, the run begins by a sketch, with the head
LATER_SHARE = 0.4  # of the time left after that, at most, goes into the profile; else the head trains to the end
LAUNCHED_STEP = (
    4.0  # times what a replayed step takes, one may take that is launched piece by piece (ResNet50 on an H200)
)
HEAD_PASSES = 4.0
HEAD_SHARE = 0.5  # of the time left at most goes into the head
RECHOOSE = 0.5  # of a stage's time has passed: look whether something else would be worth more by now
BETTER = 1.2  # times as much worth is expected of another stage before the one that stands is left for it
WAITING_STEPS = 20  # between two looks at the clock, where looking means waiting for a device


class Adaptive(Elastic):
    """Decides for a whole run; `et.fit(policy="adaptive")` makes one. Its parts are those of `et.Elastic`.

    `allowed_s` is what training may take: a share of what `epochs` of full training would take on this machine, or, of
    a deadline, what the end of the run leaves (`ending`). It goes like this:

        prices     a profile; where it would take over a twentieth of the budget, a sketch of one, and the profile later
        head       features below the output layer, once a view; that layer alone on them, for a few passes
        stages     probe, choose the stage of the largest expected worth (policies/adaptive.py), train on it;
                   half-way look again, and change if something else is expected to be worth a fifth more

    `progress` goes from 0 to 1 with the time. With `deterministic`, time is what the profile says that steps take, so
    that every decision comes out the same after any number of restarts.

    Args:
        loader: ours, if features are to be kept: it knows samples and views before it reads them.
        began: when the deadline's clock started.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFn,
        *,
        budget: str | float | Budget,
        epochs: int,
        loader: Any,
        keep: Keep,
        ending: Ending | None = None,
        began: float | None = None,
        deterministic: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        **options: Any,
    ) -> None:
        super().__init__(
            model, optimizer, loss_fn, budget=budget, policy=ADAPTIVE, deterministic=deterministic, feedback=False,
            clock=clock, **options,
        )  # fmt: skip
        self.asked = Budget.parse(budget)
        self.run_epochs, self.keep = epochs, keep
        self.overhead_s["features"] = 0.0
        self.stage: Stage | None = None
        self.finished = False
        self.features = Features(
            keep, model, loss_fn, loader, bn=options.get("bn", "frozen"), deterministic=deterministic
        )
        self._ending, self._deterministic = ending, deterministic
        self._began = clock() if began is None else began
        self._before_s, self._paused_s, self._virtual_s = 0.0, 0.0, 0.0
        self._stage_from_s = self._stage_until_s = 0.0
        self._rechosen = self._last = False
        self._position: int | None = None

    # -- time ----------------------------------------------------------------------------------------------------------

    @property
    def deadline(self) -> bool:
        """Whether the budget is a time for everything, evaluation and checkpoints included."""
        return self.asked.kind == "seconds"

    @property
    def elapsed_s(self) -> float:
        """Of the budget, so far."""
        if self._deterministic:
            return self._virtual_s
        return self._before_s + self._clock() - self._began - (0.0 if self.deadline else self._paused_s)

    @property
    def reference_s(self) -> float:
        """What full training would take on this machine."""
        assert self.profile is not None, "asked only after the first batch"
        return self._steering.prices(self.profile).full_step_s * self._steering.steps_per_epoch * self.run_epochs

    @property
    def allowed_s(self) -> float:
        if not self.deadline:
            return self.asked.value * self.reference_s
        return max(self.asked.value - self._end_s, 1e-9)

    @property
    def _end_s(self) -> float:
        return 0.0 if self._ending is None else self._ending.seconds()

    @property
    def left_s(self) -> float:
        """Until the deadline, the end of the run included; below zero it is late."""
        return self.asked.value - self.elapsed_s if self.deadline else math.inf

    @property
    def progress(self) -> float:
        """The share of the time that is used: what the learning rate follows."""
        return min(self.elapsed_s / self.allowed_s, 1.0) if self.profile is not None else 0.0

    @property
    def ratio(self) -> float | None:
        return self._training_s / self.reference_s if self.profile is not None else None

    @property
    def _training_s(self) -> float:
        return self.elapsed_s - (self._paused_s if self.deadline and not self._deterministic else 0.0)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def inputs(self, batch: Any) -> Any:
        """All that a batch's loss is a function of: what was kept of it, too."""
        return self.features.inputs(batch)

    def loss_of(self, model: nn.Module, inputs: Any) -> Tensor:
        """The loss to train by, of what `inputs` gave."""
        return self.features.loss_of(model, inputs)

    @contextmanager
    def recording(self) -> Iterator[None]:
        with self._charge("record"):  # within the run's budget, as everything is
            yield

    @property
    def standing(self) -> Hashable:
        return super().standing, self.features.standing

    def epoch(self, loader: Any) -> Iterator[Any]:
        """The batches of one pass over the data, or as many as there is time for.

        Raises:
            DataError: the loader gave no batch at all.
            BudgetError: the time is too short for anything.
        """
        self._steering.steps_per_epoch = len(loader)
        data = pass_over(loader, position=self._position, clock=self._clock)
        if not data.more and not self._position:
            raise DataError("the loader gave no batch; an epoch of nothing would train nothing")
        if self.stage is not None:
            self.finished = self.elapsed_s >= self.allowed_s
            if self._applied is None:  # loaded from a state, and not yet on the model
                self._stand()
                self._begin_keeping(data)
            self._fill()
        felt = self._ending is not None and self._device.type == "cpu"
        while data.more and not self.finished:
            self._decide(data)
            for batch in data.batches(self.features.keeper if self.stage_is_kept else None):
                # Counted when handed out: a state taken in the loop's body, after the step, is then up to date.
                assert self.stage is not None
                self.place.step()
                self._position = data.position
                self.history[-1]["steps"] += 1
                self._virtual_s += self.stage.step_s
                before = self._clock() if felt else 0.0
                yield batch
                if self._device.type == "cpu" or self.steps % WAITING_STEPS == 0:
                    self._now()  # waits for a device, so that the clock tells what has been done, not what was asked
                    if self._ending is not None:
                        if felt:
                            self._ending.stepped(self.stage.step_s, self._clock() - before)
                        self._ending.feel(self.progress)
                    self.finished = self.elapsed_s >= self.allowed_s
                    if self.finished or self._stage_is_over():
                        break
        self.place.end_epoch()
        self._position = None

    def _stage_is_over(self) -> bool:
        if self.history[-1]["reason"] == "head" and not self._last:
            return self.history[-1]["steps"] >= HEAD_PASSES * self._steering.steps_per_epoch or self._past(1.0)
        return not self._rechosen and self._past(RECHOOSE)

    def _past(self, share: float) -> bool:
        return self.elapsed_s >= self._stage_from_s + share * (self._stage_until_s - self._stage_from_s)

    # -- deciding ------------------------------------------------------------------------------------------------------

    def _decide(self, data: Pass) -> None:
        """Begin the first stage; the next one when a stage is over; otherwise nothing."""
        if self.stage is not None and not self._stage_is_over():
            return
        with self._around():
            if self.stage is None:
                self._find_prices(data)
                if self._begin_head(data):
                    return
            self._begin_next(data)

    def _find_prices(self, data: Pass) -> None:
        """A sketch of them where a profile would take too much of the budget, else a profile."""
        if self._sketches_first:
            with self._charge("profile"):
                self.profile = sketch(
                    self.model, self.loss_fn, data.peek(1)[0], optimizer=self.optimizer, bn=self._bn,
                    captured=self.captured,
                )  # fmt: skip
            self._steering.profiled(self.profile, taken=True)
        if not is_sketch(self.profile) or least_profile_s(self.profile) <= SHORT_SHARE * self._left_s:
            self._find_all_prices(data)
        self._refuse_if_too_little()

    @property
    def _sketches_first(self) -> bool:
        """Whether a profile might take more than its share, and there is something to be done without one."""
        if self.profile is not None or self.cache is not None or self.memory is not None:
            return False  # there is one, or may be, or what a step holds has to be known
        if not self.features.possible or self._deterministic or ranks() > 1:
            return False
        full_steps = self.run_epochs * self._steering.steps_per_epoch
        launched = LAUNCHED_STEP if self.captured else 1.0
        return self.deadline or (LEAST_EFFORT + BESIDES) * launched > SHORT_SHARE * self.asked.value * full_steps

    def _find_all_prices(self, data: Pass) -> None:
        try:
            self._price(data.peek(1)[0], anew=is_sketch(self.profile))
        except BudgetError as error:
            least_s = math.ceil((error.least or 0.0) / PROFILE_SHARE + self._end_s)  # it says what it would take
            raise BudgetError(
                f"budget {self.asked} leaves no time to train: {error}; try {format_seconds(least_s)}", least=least_s
            ) from error

    def _refuse_if_too_little(self) -> None:
        """What has been used to find out what a step costs must leave time for the cheapest steps."""
        assert self.profile is not None
        floor_s = self.profile.with_kept_prefix(rebuilt=0.0).floor_s
        if self.elapsed_s + 10 * floor_s < self.allowed_s:
            return
        least_s = 2 * (self.elapsed_s + 10 * floor_s) + (self._end_s if self.deadline else 0.0)
        least = math.ceil(least_s) if self.deadline else least_s / self.reference_s
        if self.deadline:
            advice = f"try {format_seconds(least)}"
        elif least <= 1:
            advice = f"try {math.ceil(least * 1e3) / 1e3:g}x"
        else:
            advice = "a run this short is not worth planning: use policy 'full', or more epochs"
        raise BudgetError(
            f"budget {self.asked} leaves no time to train: finding out what a step costs took "
            f"{format_seconds(self.elapsed_s)} of {format_seconds(self.allowed_s)}; {advice}",
            least=least,
        )

    def _begin_head(self, data: Pass) -> bool:
        """The output layer on kept features, if this model and loader let features be kept."""
        if self.features.keeper is None:
            return False
        assert self.profile is not None
        stage = head_stage(self._prices, self.features.keeping, pin=self.pin, memory=self.memory, passes=HEAD_PASSES)
        self._enter(stage, data, reason="head", until_s=self.elapsed_s + HEAD_SHARE * self._left_s)
        if self.stage_is_kept:
            return True
        self.stage = None
        return False

    def _begin_next(self, data: Pass) -> None:
        before = self.stage
        if is_sketch(self.profile) and not self._find_prices_later(data):
            self._go_on()
            return
        if self._reprice:  # steps are not what they were priced as
            try:
                self._price(data.peek(1)[0])
            except BudgetError:
                if before is None:
                    raise
                self._go_on()  # there is no time left to find out what they cost now
                return
        draw = self.probe_batches
        step_s = self._prices.full_step_s * (1.0 if self._ending is None else self._ending.slower)
        affordable = int(PROBE_SHARE * self._left_s / (draw.steps * step_s))
        if before is not None and not affordable:
            self._go_on()
            return
        count = min(max(affordable, 1), draw.count)
        batches = data.peek(count * draw.ahead // draw.count)
        if before is not None and len(batches) < draw.least:
            return  # the pass is at its end; whatever is due is due again at the next one's start
        scores = self._probe(batches)
        assert scores is not None, "the policy needs scores"
        try:
            stage = self._choose_stage(scores)
        except BudgetError:
            if before is None:
                raise
            self._go_on()
            return
        self.scores = scores
        if before is not None and self.history[-1]["reason"] != "head":
            self._rechosen = True
            passes = self._left_s / (self._steps_per_pass * before.step_s)
            if stage.plan.id == before.plan.id or stage.worth < BETTER * worth(before.plan, scores, passes):
                return
        first = before is None or self.history[-1]["reason"] == "head"
        self._enter(stage, data, reason="stage" if first else "better", until_s=self.allowed_s)
        if stage.kept and not self.stage_is_kept:  # at these prices it would not have been chosen
            self._enter(self._choose_stage(scores, kept=False), data, reason="without features", until_s=self.allowed_s)
        self._rechosen = not first

    def _find_prices_later(self, data: Pass) -> bool:
        """After a beginning by a sketch: the profile, if it leaves most of the time to what is chosen by it."""
        if self.stage is None:  # the head could not be trained on kept features: there is nothing else to go by
            Elastic.undo(self)
            self._find_all_prices(data)
            self._refuse_if_too_little()
            return True
        if least_profile_s(self.profile) > LATER_SHARE * self._left_s:
            return False
        Elastic.undo(self)  # what was kept is kept on: the head may train to the end yet
        try:
            self._price(data.peek(1)[0], anew=True)
        except BudgetError:
            return False
        finally:
            self._stand()
        return True

    @property
    def stage_is_kept(self) -> bool:
        """Whether steps are made on features now."""
        return self.stage is not None and self.stage.kept

    def _choose_stage(self, scores: Mapping[str, float], *, kept: bool = True) -> Stage:
        with self._charge("select"):
            return choose_stage(
                self._prices, scores, left_s=self._left_s, steps_per_pass=self._steps_per_pass,
                keeping=self.features.keeping if kept and self.features.possible else None,
                pin=self.pin, memory=self.memory,
            )  # fmt: skip

    def _go_on(self) -> None:
        """There is no time left for anything else: what trains now trains to the end."""
        self._stage_until_s, self._rechosen, self._last = self.allowed_s, True, True

    @property
    def _prices(self) -> Any:
        assert self.profile is not None
        return self._steering.prices(self.profile)

    @property
    def _left_s(self) -> float:
        return max(self.allowed_s - self.elapsed_s, 0.0)

    @property
    def _steps_per_pass(self) -> int:
        """Over the samples whose features there was time to keep."""
        return max(1, round(self.features.share * self._steering.steps_per_epoch))

    def _enter(self, stage: Stage, data: Pass, *, reason: str, until_s: float) -> None:
        self._stage_from_s, self._stage_until_s = self.elapsed_s, until_s
        self.stage = stage
        self._adopt(stage.plan, reason=reason)
        if stage.kept:
            self._begin_keeping(data)
            self._fill()

    def _begin_keeping(self, data: Pass) -> None:
        if self.features.keeper is None or self.stage is None or not self.stage.kept:
            return
        with self._charge("features"):
            active = self.features.stand(data.peek(1)[0], views=self.stage.views)
        if not active:
            self._do_without()

    def _do_without(self) -> None:
        """This plan cannot be had without its prefix, or not with gain: its steps cost what they cost."""
        assert self.stage is not None
        plan = self.stage.plan
        step_s = self._prices.step_s(plan.trainable)
        self.stage = Stage(plan, False, self._left_s / (self._steps_per_pass * step_s), step_s, self.stage.worth)

    def _fill(self) -> None:
        """Features for the epoch that begins, of as many samples as the stage has time for."""
        keeper, stage = self.features.keeper, self.stage
        if keeper is None or not keeper.active or stage is None or not stage.kept:
            return
        graph = self._prices.graph
        below = ~graph.reached(graph.indices(stage.plan.trainable))
        prefix_s = max(float(lane.forward_s[below].sum()) for lane in self._prices.lanes)
        start = self._now()
        with self._charge("features"):
            gain = self.features.fill(
                self.epochs,
                prefix_s=prefix_s,
                left_s=lambda: self.allowed_s - self.elapsed_s,
                took_s=lambda: self._now() - start,
            )
        if not gain:
            self._do_without()

    # -- what others read ----------------------------------------------------------------------------------------------

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Work inside is not training; it is charged to a deadline, and to no other budget."""
        start = self._now()
        try:
            yield
        finally:
            self._paused_s += self._now() - start

    def undo(self) -> None:
        super().undo()
        self.features.release()

    def _profile_limit_s(self) -> float | None:
        return PROFILE_SHARE * self._left_s if self.deadline and not self._deterministic else None

    def _effort(self) -> int:
        # Half a percent of the run, as ever; of a deadline it is not known yet how many steps that would be.
        return LEAST_EFFORT if self.deadline else super()._effort()

    @property
    def stats(self) -> dict[str, Any]:
        """As of `Elastic`, with the run as the measure: `measured_ratio` is the time that training took, deciding and
        building included, over that of `epochs` of full training."""
        assert self.profile is not None
        # Operations are counted in a pause (`fit`), which is no part of the training's time.
        deciding_s = sum(seconds for part, seconds in self.overhead_s.items() if part != "flops")
        steps_s = max(self._training_s - deciding_s, 0.0)
        whole_s = self.reference_s
        return {
            "policy": self.policy.name,
            "importance": self.importance.name,
            "budget": str(self.asked),
            "steps": self.steps,
            "spent_s": steps_s,
            "full_step_s": self._prices.full_step_s,
            "step_s": steps_s / self.steps if self.steps else None,
            "predicted_ratio": self._virtual_s / whole_s,
            "measured_ratio": self._training_s / whole_s,
            "machine": self._steering.pace.machine,
            "compilations": self._compilations.count(),
            "overhead_s": dict(self.overhead_s),
            "plans": [dict(event) for event in self.history],
            "features": self.features.account(),
        }

    def state_dict(self) -> dict[str, Any]:
        """As of `Elastic`, and where the course stands."""
        stage = self.stage
        return super().state_dict() | {
            "course": {
                "elapsed_s": self.elapsed_s,
                "virtual_s": self._virtual_s,
                "paused_s": self._paused_s if self.deadline else 0.0,
                "stage": None if stage is None else [stage.kept, stage.passes, stage.step_s, stage.worth, stage.views],
                "from_s": self._stage_from_s,
                "until_s": self._stage_until_s,
                "rechosen": self._rechosen,
                "last": self._last,
                "rebuild": self.features.rebuild,
                "groups": self.features.groups,
                "position": self._position,
                "finished": self.finished,
            }
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        course = state["course"]
        self._before_s, self._virtual_s = course["elapsed_s"], course["virtual_s"]
        self._began = self._clock()
        self._paused_s = course["paused_s"]
        if not self.deadline:
            self._paused_s = 0.0
        if course["stage"] is not None and self.plan is not None:
            self.stage = Stage(self.plan, *course["stage"])
        self._stage_from_s, self._stage_until_s = course["from_s"], course["until_s"]
        self._rechosen = course["rechosen"]
        self.features.rebuild, self.features.groups = course["rebuild"], course["groups"]
        self._position, self.finished, self._last = course["position"], course["finished"], course["last"]
