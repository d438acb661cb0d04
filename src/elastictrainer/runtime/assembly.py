"""Assembly: the parts of a run that its options decide about (controller, engine, schedule), made and wired up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau

from elastictrainer.budget import Budget
from elastictrainer.errors import ConfigError
from elastictrainer.policies import find_policy
from elastictrainer.policies.adaptive import ADAPTIVE
from elastictrainer.profiling.profile import Profile
from elastictrainer.runtime.adaptive import Adaptive
from elastictrainer.runtime.apply import unwrap
from elastictrainer.runtime.capture import find_recorder
from elastictrainer.runtime.controller import Elastic
from elastictrainer.runtime.ending import Ending
from elastictrainer.runtime.engine import Eager, Replayed
from elastictrainer.runtime.probe_batches import source_of
from elastictrainer.runtime.ranks import ranks
from elastictrainer.runtime.run_folder import RunFolder
from elastictrainer.runtime.schedules import TimedCosine
from elastictrainer.runtime.settings import Settings, length

__all__ = ["make_elastic", "make_engine", "make_schedule"]

LossFn = Callable[[nn.Module, Any], Tensor]


def make_elastic(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    deciding: dict[str, Any],
    *,
    settings: Settings,
    train_loader: Iterable[Any],
    val_loader: Iterable[Any] | None,
    folder: RunFolder | None,
    make_ending: Callable[[], Ending],
    began: float,
    **watching: Any,
) -> Elastic:
    """The controller that the options ask for: of every step, or (`Adaptive`) of the run.

    `watching` goes to it as it is: the clock, the gradient scaler, who is told of plans.
    """
    steps_per_epoch = length(train_loader)
    total = None if steps_per_epoch is None else steps_per_epoch * settings.epochs
    options = dict(deciding)
    options["gradient_from"] = source_of(options["gradient_from"], held_out=val_loader)
    asked, keep = Budget.parse(options.pop("budget")), options.pop("keep")
    adaptive = find_policy(options["policy"]) is ADAPTIVE
    if asked.kind == "seconds" and not adaptive:
        if total is None:
            raise ConfigError(
                f"budget {asked} is for all steps together, and the loader does not say how many there are"
            )
        asked = Budget("seconds", asked.value / total)
    # Of a run killed before its first checkpoint the profile is all that is left. What rests on it bit by bit takes
    # it again; otherwise a new one is better: the machine, or how much of it is used, may be another by now.
    if options["profile"] is None and settings.resume and settings.deterministic and folder is not None:
        kept = folder.read_json("profile.json")
        options["profile"] = Profile.from_dict(kept) if kept is not None else None
    options |= {
        "budget": asked, "total_steps": total, "seed": settings.seed, "deterministic": settings.deterministic,
        **watching,
    }  # fmt: skip
    if not adaptive:
        return Elastic(model, optimizer, loss_fn, **options)
    if total is None:
        raise ConfigError("policy 'adaptive' plans a whole run, and the loader does not say how long an epoch is")
    for name in ("policy", "feedback", "interval"):
        options.pop(name)
    return Adaptive(
        model, optimizer, loss_fn, epochs=settings.epochs, loader=train_loader,
        keep=replace(keep, folder=None if folder is None else folder.path / "features"),
        ending=make_ending() if asked.kind == "seconds" else None, began=began, **options,
    )  # fmt: skip


def make_engine(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    elastic: Elastic,
    *,
    settings: Settings,
    scaler: GradScaler,
    gives_up: Callable[[str], None],
) -> Eager:
    """Steps that are recorded and replayed where that is wanted and possible, and steps as ever elsewhere."""
    adaptive = elastic if isinstance(elastic, Adaptive) else None
    make: Callable[..., Eager] = Eager
    recorder = find_recorder(next(model.parameters()).device) if settings.graphs else None
    # Accumulated gradients stay where they are, networks that shrink and ranks that talk do not; and what is to be
    # bit by bit the same after a kill must not hang on where a recording began.
    apart = settings.accumulate > 1 or elastic.policy.shrinks or settings.deterministic or ranks() > 1
    if recorder is not None and not apart and unwrap(model) is model:
        elastic.captured = True
        make = partial(
            Replayed, recorder=recorder, standing=lambda: elastic.standing, allowed=lambda: elastic.replays,
            recording=elastic.recording, gives_up=gives_up,
        )  # fmt: skip
    return make(
        model,
        optimizer,
        adaptive.loss_of if adaptive is not None else loss_fn,
        inputs=adaptive.inputs if adaptive is not None else _itself,
        scaler=scaler,
        clip=settings.clip,
    )


def make_schedule(
    optimizer: Optimizer, elastic: Elastic, *, settings: Settings, steps_per_epoch: int | None
) -> Any | None:
    """The learning rate's schedule: over the run's steps, or over its time where that is what is counted."""
    if settings.scheduler == "cosine" and isinstance(elastic, Adaptive):
        return TimedCosine(optimizer, lambda: elastic.progress)
    if settings.scheduler == "cosine":
        assert steps_per_epoch is not None
        steps = -(-steps_per_epoch // settings.accumulate) * settings.epochs
        return CosineAnnealingLR(optimizer, T_max=steps)
    if isinstance(settings.scheduler, str):
        raise ConfigError(
            f"scheduler {settings.scheduler!r} is not known; use 'cosine', None, or a scheduler of your own"
        )
    if isinstance(settings.scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau is stepped with a validation's loss, and schedules here with the optimizer; use "
            "'cosine', None, or an LR scheduler whose step() needs nothing"
        )
    return settings.scheduler


def _itself(batch: Any) -> Any:
    return batch
