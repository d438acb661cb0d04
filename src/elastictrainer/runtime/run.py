"""Run: what the loop carries along besides the training itself: where it stands, its folder and its checkpoints.

Its parts are put together in `assembly`; `judge` evaluates, and `summary` makes the figures that are written down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastictrainer.budget import Budget, format_seconds
from elastictrainer.errors import BudgetError, CheckpointError, TrainingError
from elastictrainer.metrics import synchronize
from elastictrainer.policies import find_policy
from elastictrainer.profiling.profile import Profile
from elastictrainer.profiling.sketch import is_sketch
from elastictrainer.report import write_report
from elastictrainer.runtime.adaptive import Adaptive
from elastictrainer.runtime.apply import unwrap
from elastictrainer.runtime.assembly import make_elastic, make_engine, make_schedule
from elastictrainer.runtime.ending import Ending
from elastictrainer.runtime.evaluate import Score
from elastictrainer.runtime.feed import Feed
from elastictrainer.runtime.judge import Judge
from elastictrainer.runtime.losses import Losses
from elastictrainer.runtime.meters import Meters
from elastictrainer.runtime.probe_batches import check_source
from elastictrainer.runtime.progress import Board, describe, make_progress
from elastictrainer.runtime.prunetrain import PruneTrain
from elastictrainer.runtime.resize import resize
from elastictrainer.runtime.result import Record, Result, versions
from elastictrainer.runtime.run_folder import DIVERGED, RunFolder
from elastictrainer.runtime.settings import Settings, configuration, length
from elastictrainer.runtime.streams import read_streams, seed_streams, write_streams
from elastictrainer.runtime.summary import epoch_line, make_result
from elastictrainer.runtime.surroundings import (
    check_weights,
    deterministic_kernels,
    load_weights,
    modes_restored,
    with_autocast,
)

__all__ = ["Run"]

LAUNCHED = 3.0  # times what a replayed forward pass takes, one may take that is launched piece by piece


class Run:
    """One run of `fit`. `stack` closes what it opens."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        train_loader: Iterable[Any],
        val_loader: Iterable[Any] | None,
        settings: Settings,
        deciding: dict[str, Any],
        out: str | Path | None,
        config: dict[str, Any],
        clock: Callable[[], float],
        stack: ExitStack,
    ) -> None:
        self.model, self.optimizer, self.train_loader, self.val_loader = model, optimizer, train_loader, val_loader
        self.settings, self.clock, self.began = settings, clock, clock()
        self.test_loader: Iterable[Any] | None = None
        self.device = next(model.parameters()).device
        self.batches_per_epoch = length(train_loader)
        settings.check(
            has_validation=val_loader is not None, has_folder=out is not None, steps_per_epoch=self.batches_per_epoch
        )
        check_source(deciding, held_out=val_loader, steps_per_epoch=self.batches_per_epoch)
        self.config = {**config, **configuration(model, optimizer, train_loader, settings, deciding)}
        self.folder: RunFolder | None = None
        if out is not None:
            open_folder = RunFolder.reopen if settings.resume else RunFolder.create
            self.folder = open_folder(out, self.config, environment=versions(self.device))
            stack.callback(self.folder.close)
        self.finished = self._finished()
        if self.finished is not None:
            return

        stack.enter_context(modes_restored(model))
        stack.callback(torch.set_num_threads, torch.get_num_threads())  # a deadline may make them fewer
        if settings.deterministic:
            stack.enter_context(deterministic_kernels())
        seed_streams(settings.seed)
        self.loss_fn = with_autocast(loss_fn, self.device, settings.autocast)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=settings.autocast == "fp16")
        self.record = Record()
        self.losses = Losses(self.device)
        self.meters = Meters(self.device, self.record)
        self.judge = Judge(model, self.loss_fn, settings, self.record, clock=clock)
        self.elastic = make_elastic(
            model, optimizer, self.loss_fn, deciding, settings=settings, train_loader=train_loader,
            val_loader=val_loader, folder=self.folder, make_ending=self._make_ending, began=self.began, clock=clock,
            scaler=self.scaler if self.scaler.is_enabled() else None, on_plan=self._on_plan,
            around=self.meters.deciding,
        )  # fmt: skip
        self.adaptive = self.elastic if isinstance(self.elastic, Adaptive) else None
        self.engine = make_engine(
            model, optimizer, self.loss_fn, self.elastic, settings=settings, scaler=self.scaler,
            gives_up=self._on_graphs_given_up,
        )  # fmt: skip
        self.schedule = make_schedule(
            optimizer, self.elastic, settings=settings, steps_per_epoch=self.batches_per_epoch
        )
        stack.callback(self.elastic.undo)
        self.pruning: PruneTrain | None = None
        if self.elastic.policy.shrinks:
            self.pruning = PruneTrain(model, optimizer, interval=self.elastic.interval)
            self.elastic.shrinking = True
            stack.callback(self.pruning.close)
        self._best_in_memory: dict[str, Tensor] | None = None
        self._kept_profile: Profile | None = None
        notes = self._resume() if settings.resume and self.folder is not None else []
        self._saved_at = clock()
        self.judge.begin(self._saved_at)
        total = None
        if self.batches_per_epoch is not None and self.adaptive is None:
            total = self.batches_per_epoch * settings.epochs
        self.progress = make_progress(settings.progress, total=total, done=self.record.step)
        stack.callback(self.progress.close)
        for note in notes:
            self.say(note)
        self.board: Board | None = None
        if settings.tensorboard and self.folder is not None:
            self.board = Board(self.folder.path / "tensorboard")
            stack.callback(self.board.close)

    # -- beginning ---------------------------------------------------------------------------------------------------

    def _finished(self) -> Result | None:
        """The result of a run that had already ended: its weights are put into the model."""
        document = self.folder.read_json("result.json") if self.folder is not None else None
        if document is None or self.folder is None:
            return None
        weights = self.folder.read_weights("model.safetensors")
        if find_policy(self.config["policy"]).shrinks:
            resize(self.model, weights)
        load_weights(self.model, weights)
        if not (self.folder.path / "report.html").exists():  # killed when all but the page had been written
            write_report(self.folder.path)
        return Result.from_dict(document)

    def _make_ending(self) -> Ending:
        def forward_s() -> float:
            profile = self.elastic.profile
            return 0.0 if profile is None else profile.forward_s * (LAUNCHED if profile.captured else 1.0)

        self.judge.ending = Ending(
            lambda: [loader for loader in (self.val_loader, self.test_loader) if loader is not None],
            self.judge.score,
            record=lambda: self.record,
            forward_s=forward_s,
            left_s=lambda: self.adaptive.left_s if self.adaptive is not None else math.inf,  # asked once it is there
            clock=self.clock,
            wait=lambda: synchronize(self.meters.device),
            go_alone=self._go_alone(),
            deterministic=self.settings.deterministic,
        )
        return self.judge.ending

    def _go_alone(self) -> Callable[[bool], object] | None:
        """What computes with one thread from now on, or with all that were given."""
        given = torch.get_num_threads()
        if self.device.type != "cpu" or given == 1:
            return None
        return lambda alone: torch.set_num_threads(1 if alone else given)

    def _resume(self) -> list[str]:
        assert self.folder is not None
        state = self.folder.checkpoints.load()
        notes = list(self.folder.checkpoints.notes)
        if state is None:
            self.folder.wind_back({})
            return [*notes, f"{self.folder.path} holds no checkpoint yet: from the beginning"]
        try:
            if self.pruning is not None:
                self.pruning.load_state_dict(state["pruning"], state["weights"])
            load_weights(self.model, state["weights"])
            self.optimizer.load_state_dict(state["optimizer"])
            if self.schedule is not None:
                self.schedule.load_state_dict(state["schedule"])
            self.scaler.load_state_dict(state["scaler"])
            self.elastic.load_state_dict(state["elastic"])
            self.record = Record.from_dict(state["record"])
        except (KeyError, ValueError, RuntimeError, TypeError) as error:
            raise CheckpointError(
                f"{self.folder.path}: the checkpoint does not fit this model and optimizer: {error}"
            ) from error
        self.record.restarts += 1
        self.meters.record = self.judge.record = self.record
        self.losses.total, self.losses.count = self.record.loss_total, self.record.loss_count
        self.folder.wind_back(state["logs"])
        write_streams(state["streams"])
        return [*notes, f"going on from epoch {self.record.epoch + 1}, step {self.record.step}"]

    # -- an epoch ----------------------------------------------------------------------------------------------------

    @property
    def goes_on(self) -> bool:
        record, patience = self.record, self.settings.early_stop
        if self.adaptive is not None and self.adaptive.finished:
            return False
        if patience is not None and record.best_epoch is not None and record.epoch - 1 - record.best_epoch >= patience:
            return False
        return self.adaptive is not None or record.epoch < self.settings.epochs

    def begin_epoch(self) -> None:
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        self.meters.begin()

    def feed(self) -> Feed:
        """The batches of this epoch that are still to come."""
        return Feed(
            self.train_loader,
            epoch=self.record.epoch,
            start=self.record.batch,
            seed=self.settings.seed,
            device=self.device,
        )

    def shrink(self, batch: Any) -> None:
        """At PruneTrain's intervals: take out of the network what has become zero. Not paused: its time counts."""
        record = self.record
        if self.pruning is None or not self.pruning.due(epoch=record.epoch, batch=record.batch, step=record.step):
            return
        before = sum(p.numel() for p in self.model.parameters())
        self.elastic.undo()
        gone = self.pruning.rebuild(self.loss_fn, batch)
        self.elastic.rebuilt(smaller=gone > 0)
        if gone:
            after = sum(p.numel() for p in self.model.parameters())
            self.say(f"{gone} channels are gone: {after / before:.1%} of the {before} parameters are left")
        else:
            self.say("no channel has reached zero: the network stays as large as it is")

    def count_flops(self, batch: Any) -> None:
        """Once a plan: the operations of a step of it, counted on an extra one that leaves no trace."""
        plan = self.elastic.plan_id
        if plan not in self.record.flops_by_plan:
            start, overhead_s = self.clock(), self.elastic.overhead_s
            with self.elastic.pause(), self.meters.paused():
                self.record.flops_by_plan[plan] = self.meters.step_flops(
                    self.model, self.engine.loss_fn, self.engine.inputs(batch)
                )
            overhead_s["flops"] = overhead_s.get("flops", 0.0) + self.clock() - start

    @property
    def group_size(self) -> int:
        """Batches whose gradients go into the step that the present one belongs to: the last group may be short."""
        accumulate, batches = self.settings.accumulate, self.batches_per_epoch
        if batches is None:
            return 1
        return min(accumulate, batches - self.record.batch // accumulate * accumulate)

    def stepped(self, loss: Tensor) -> None:
        """A batch has gone forward and backward."""
        if self.pruning is not None:
            self.pruning.saw(loss)
        self.record.step += 1
        self.record.batch += 1
        self.losses.add(loss, step=self.record.step)
        if self.record.step % 10 == 0 or self.device.type == "cpu":
            self._show()

    @property
    def gradients_complete(self) -> bool:
        return self.record.batch % self.settings.accumulate == 0 or self.record.batch == self.batches_per_epoch

    def schedule_step(self, *, skipped: bool) -> None:
        """After an optimizer step; one that the gradient scaler skipped moves no schedule."""
        if skipped:
            return
        self.record.optimizer_steps += 1
        if self.schedule is not None:
            self.schedule.step()

    def end_epoch(self) -> None:
        """Evaluate, keep the best, write the epoch down, and make it last."""
        record = self.record
        self.losses.check(step=record.step)
        self.meters.end()
        score = None
        if self.val_loader is not None and self._worth_evaluating:
            score = self.evaluate(self.val_loader)
        if score is not None:
            best = record.score_of(record.best_epoch)
            if score.better_than(Score(**best) if best else None):
                record.best_epoch = record.epoch
                self._keep_best()
        if self.val_loader is not None:
            record.scores.append(score.to_dict() if score is not None else None)
        record.losses.append(self.losses.mean)
        self._write_epoch(score)
        self.losses.reset()
        record.epoch, record.batch = record.epoch + 1, 0
        self.checkpoint()

    @property
    def _worth_evaluating(self) -> bool:
        adaptive = self.adaptive
        timed, last = adaptive is not None, adaptive is not None and adaptive.finished
        return self.judge.is_worth_it(timed=timed, last=last)

    def evaluate(self, loader: Iterable[Any]) -> Score:
        with self.elastic.pause():
            score = self.judge.evaluate(loader)
        if score.share < 1:
            self.say(f"the time was up: judged by {score.count} of the samples, {score.share:.0%} of the batches")
        return score

    def _write_epoch(self, score: Score | None) -> None:
        rate = float(self.optimizer.param_groups[0]["lr"])  # a tensor, in an optimizer that was built with one
        line = epoch_line(self.elastic, self.record, loss=self.losses.mean, score=score, lr=rate)
        if self.folder is not None:
            self.folder.log("metrics.jsonl", line)
        if self.board is not None:
            self.board.add(self.record.step, line)
        self._show()
        figures = self._fields(self.losses.mean, score.accuracy if score else None)
        self.say(f"epoch {line['epoch']}/{self.settings.epochs}  {describe(figures)}")

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def checkpoint_due(self) -> bool:
        return self.folder is not None and self.clock() - self._saved_at >= self.settings.checkpoint_every_s

    def checkpoint(self) -> None:
        """Make everything so far last. Only what is finite is saved, so the last checkpoint is always a good one."""
        if self.folder is None:
            return
        with self.elastic.pause(), self.meters.paused():
            start = self.clock()
            self.losses.check(step=self.record.step)
            check_weights(self.model, step=self.record.step)
            self.record.loss_total, self.record.loss_count = self.losses.total, self.losses.count
            state = {
                "weights": unwrap(self.model).state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict() if self.schedule is not None else None,
                "scaler": self.scaler.state_dict(),
                "elastic": self.elastic.state_dict(),
                "pruning": self.pruning.state_dict() if self.pruning is not None else None,
                "record": self.record.to_dict(),
                "streams": read_streams(),
                "logs": self.folder.log_lengths(),
            }
            best = self.record.best_epoch
            self.folder.checkpoints.save(state, refers_to=() if best is None else (_best_name(best),))
            self._saved_at = self.clock()
            self.record.checkpoint_s += self._saved_at - start
            self.record.checkpoints += 1

    def _keep_best(self) -> None:
        weights = unwrap(self.model).state_dict()
        if self.folder is not None:
            name = f"checkpoint/{_best_name(self.record.epoch)}"
            self.folder.write_weights(name, weights, {"epoch": str(self.record.epoch + 1)})
        else:
            self._best_in_memory = {key: value.detach().clone() for key, value in weights.items()}

    def how_to_go_on(self, what: str) -> str:
        """Where the run stands for whoever wants to continue it."""
        if self.folder is None:
            return f"{what}: none, since no folder was given (out=)"
        kept = self.folder.checkpoints.generations()
        if not kept:
            return f"{what}: none yet in {self.folder.path}"
        return f"{what}: {kept[-1]}; go on with resume=True (--resume) and out={str(self.folder.path)!r}"

    # -- the end -----------------------------------------------------------------------------------------------------

    def diverged(self, error: TrainingError) -> None:
        """Leave word of what was not finite: an outcome, which the same options would come to again."""
        if self.folder is not None:
            self.folder.write_json(DIVERGED, {"diverged": str(error)})

    def end(self, test_loader: Iterable[Any] | None) -> Result:
        """Take the best weights, evaluate them on the test data if there are any, and write everything down."""
        record = self.record
        last = record.epoch - 1
        kept = record.best_epoch if record.best_epoch is not None else last
        if kept != last:
            if self.folder is not None:
                self.folder.write_weights("last.safetensors", unwrap(self.model).state_dict(), {"epoch": str(last + 1)})
                self._take(self.folder.read_weights(f"checkpoint/{_best_name(kept)}"))
            elif self._best_in_memory is not None:
                self._take(self._best_in_memory)
        test = self.evaluate(test_loader) if test_loader is not None else None
        result = make_result(
            self.elastic, self.engine, record, self.meters, settings=self.settings, config=self.config,
            train_loader=self.train_loader, test=test, kept=kept,
            folder=None if self.folder is None else str(self.folder.path),
        )  # fmt: skip
        if self.folder is not None:
            about = {**self.settings.weights_metadata, "epoch": str(kept + 1)}
            self.folder.write_weights("model.safetensors", unwrap(self.model).state_dict(), about)
            self.folder.write_json("result.json", result.to_dict())
            write_report(self.folder.path)
        return result

    def _take(self, weights: dict[str, Tensor]) -> None:
        """Earlier weights; of a network that has shrunk since, with the channels it had."""
        if self.pruning is not None:
            self.elastic.undo()
            resize(self.model, weights)
        load_weights(self.model, weights)

    def of_the_run(self, error: BudgetError) -> BudgetError:
        """The same refusal in the unit that the run was asked in: a time for all steps, where they are planned one by
        one."""
        asked, per_step = Budget.parse(self.config["budget"] or 1.0), self.elastic.budget
        if self.adaptive is not None:  # speaks of the run as it is
            return error
        if asked.kind != "seconds" or per_step is None or error.least is None or error.of != "time":
            return error
        assert self.batches_per_epoch is not None, "a time for the run was divided by its steps"
        total = self.batches_per_epoch * self.settings.epochs
        least = format_seconds(math.ceil(error.least * total))
        return BudgetError(
            f"budget {asked} is too little for {self.settings.epochs} epochs of {self.batches_per_epoch} steps: "
            f"the least is {least}, or fewer epochs ({error})",
            least=error.least * total,
        )

    # -- words -------------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        self.progress.say(text)

    def _on_graphs_given_up(self, reason: str) -> None:
        self.elastic.replays_no_more()
        self.say(f"steps are not recorded and replayed, but launched one by one: {reason}")

    def _on_plan(self, event: dict[str, Any]) -> None:
        if self.folder is not None:
            profile = self.elastic.profile
            if profile is not None and profile is not self._kept_profile and not is_sketch(profile):
                self.folder.write_text("profile.json", profile.to_json())
                self._kept_profile = profile
            self.folder.log("plans.jsonl", event)

    def _show(self) -> None:
        known = [score["accuracy"] for score in self.record.scores if score is not None]
        self.progress.step(self.record.step, self._fields(self.losses.latest, known[-1] if known else None))

    def _fields(self, loss: float | None, accuracy: float | None) -> dict[str, float | str | None]:
        history, budget = self.elastic.history, self.elastic.budget
        return {
            "loss": loss,
            "accuracy": accuracy,
            "trained": history[-1]["share_trained"] if history else None,
            "ratio": self.elastic.ratio,
            "budget": None if budget is None else self.config["budget"],
        }


def _best_name(epoch: int) -> str:
    return f"best-{epoch + 1}.safetensors"
