"""The one loop. Everything that trains goes through it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from elastictrainer.budget import Budget, parse_bytes, parse_seconds
from elastictrainer.errors import BudgetError, TrainingError
from elastictrainer.policies import Policy
from elastictrainer.profiling.profile import Profile
from elastictrainer.runtime.evaluate import Metric
from elastictrainer.runtime.exhausted import is_out_of_memory
from elastictrainer.runtime.features import Keep
from elastictrainer.runtime.interval import Interval
from elastictrainer.runtime.kept import KeptType
from elastictrainer.runtime.result import Result
from elastictrainer.runtime.run import Run
from elastictrainer.runtime.settings import Settings
from elastictrainer.runtime.stops import Interrupts, explain_memory
from elastictrainer.selection import Pin

__all__ = ["fit"]


def fit(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    train_loader: Iterable[Any],
    *,
    epochs: int,
    budget: str | float | Budget = "0.5x",
    policy: str | Policy = "adaptive",
    importance: str = "elastic",
    interval: str | float | Interval = 3,
    pin: Pin = "head",
    probe_batches: int = 6,
    gradient_from: Literal["same", "other", "held_out"] | Iterable[Any] = "same",
    memory: str | int | None = None,
    bn: Literal["frozen", "track", "with_owner"] = "frozen",
    resting_state: Literal["keep", "drop", "offload"] = "keep",
    keep: bool = True,
    views: int = 2,
    keep_bytes: str | int | None = None,
    keep_disk: str | int | None = None,
    keep_as: KeptType = "float16",
    keep_with: Literal["bf16"] | None = None,
    val_loader: Iterable[Any] | None = None,
    test_loader: Iterable[Any] | None = None,
    metric: Metric | Literal["auto"] | None = "auto",
    scheduler: Literal["cosine"] | Any | None = "cosine",
    accumulate: int = 1,
    clip: float | None = None,
    autocast: Literal["bf16", "fp16"] | None = None,
    graphs: bool = True,
    early_stop: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: str | float = "10min",
    seed: int = 0,
    deterministic: bool = False,
    feedback: bool = True,
    profile: Profile | str | Path | None = None,
    cache: str | Path | None = None,
    progress: bool = True,
    tensorboard: bool = False,
    config: dict[str, Any] | None = None,
    weights_metadata: dict[str, str] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Result:
    """Fine-tune a model within a budget.

        result = et.fit(model, optimizer, loss_fn, train, epochs=12, budget="0.5x", val_loader=val, out="runs/birds")

    The loop and its events:

        begin        streams seeded; folder opened; with resume, everything as at the last checkpoint
        for each epoch:
            for each batch:
                plan         when due: profile (once), probe, select, apply          -> plans.jsonl, profile.json
                step         forward, backward; every `accumulate` batches: unscale, clip, optimizer, schedule
                             (runtime/engine.py: launch by launch, or recorded once and replayed)
                watch        losses looked at (every step on a CPU, every 50 on an accelerator); progress
                checkpoint   every `checkpoint_every`                                -> checkpoint/
            evaluate         on validation; the best weights are kept; early stop?
            checkpoint       at every epoch's end                                    -> metrics.jsonl, checkpoint/
        end          best weights restored; test evaluated        -> model.safetensors, result.json, report.html

    Afterwards the model holds the weights of `model.safetensors`: the best on validation, or without validation the
    last ones. Its flags are as before.

    Args:
        loss_fn: `loss_fn(model, batch)` -> scalar, for any task. Batches are moved to the model's device first.
        budget: `"0.5x"` of full training, or a time (`"30min"`). With `policy="adaptive"` it is the run's: a share of
            what `epochs` of full training would take, deciding included, or a deadline for everything, evaluation and
            checkpoints included; how many passes are made follows. With `policy="elastic"`, as published, every step
            takes at most that share, `epochs` are made, and evaluation, checkpoints and deciding come on top.
        keep, views, keep_bytes, keep_disk, keep_as, keep_with: of policy `"adaptive"`, on our own loaders: whether what
            lies below the deepest trained tensor is computed once and kept; for how many views of each image at most;
            in how much of the device's memory (by default half of what is free; 2 GiB if `deterministic`), beyond it on
            how much disk (in the run folder; none by default); as what (`"float16"`, `"bfloat16"`, `"int8"`,
            `"float32"`); and computed with what (`"bf16"`: under autocast).
        policy, importance, interval, pin, probe_batches, memory, bn, resting_state, profile, cache, feedback: see
            `et.Elastic`.
        gradient_from: as of `et.Elastic`; `"held_out"` is the `val_loader`. What is chosen by it is no longer judged by
            it alone: keep a `test_loader` for that.
        metric: `metric(model, batch)` -> (sum, count), higher is better. `"auto"`: the share of right answers where
            batches are (inputs, class numbers), else the loss alone decides what is best.
        scheduler: `"cosine"` to zero over the run, stepped with the optimizer; an LR scheduler of your own, likewise
            stepped with the optimizer; or None.
        clip: the largest norm of the gradients of what trains.
        autocast: `"bf16"`, or `"fp16"` with a gradient scaler.
        graphs: on CUDA, record a plan's step once and replay it, so that small batches do not wait for the host; prices
            are then of such steps. What cannot be recorded is made as ever; `result.graphs` says why. Turn it off if
            your model or loss reads numbers of the host's that change between steps: a recording would hold them fast.
        early_stop: stop after so many epochs without a better validation.
        out: the run folder (see `runtime/run_folder.py`); without it nothing is written and nothing can be resumed.
        resume: go on with the run in `out`, however it ended; begin it where there is none yet.
        seed: starts every random stream of the process; data order and random transforms have streams of their own.
        deterministic: decisions rest on nothing timed while running, kernels are deterministic: on a CPU a run killed
            any number of times ends with bit-equal weights.
        weights_metadata: text to be kept inside `model.safetensors`, such as what is needed to load it again.
        config: more to be written into `config.yaml` (model, data, ...); a resumed run must agree in all of it but
            `command`, which says how the run was asked for.

    Raises:
        TrainingError: a loss that is not finite, or no memory left; the last good checkpoint is kept.
        CheckpointError: the folder is taken, belongs to another run, or cannot be written (a full disk).
        BudgetError: no plan fits the budget; the least that would is stated.
        KeyboardInterrupt: Ctrl-C, after the step in progress and a checkpoint; a second one stops at once.
    """
    settings = Settings(
        epochs=epochs, accumulate=accumulate, clip=clip, autocast=autocast, early_stop=early_stop, seed=seed,
        deterministic=deterministic, checkpoint_every_s=parse_seconds(checkpoint_every), resume=resume,
        scheduler=scheduler, metric=metric, progress=progress, tensorboard=tensorboard,
        weights_metadata=weights_metadata or {}, graphs=graphs,
    )  # fmt: skip
    deciding = {
        "budget": budget, "policy": policy, "importance": importance, "interval": interval, "pin": pin,
        "probe_batches": probe_batches, "gradient_from": gradient_from, "memory": memory, "bn": bn,
        "resting_state": resting_state, "profile": profile, "cache": cache, "feedback": feedback,
        "keep": Keep(
            views, _bytes_or_none(keep_bytes), _bytes_or_none(keep_disk), keep_as, keep_with, allowed=keep
        ),
    }  # fmt: skip
    with ExitStack() as stack:
        run = Run(
            model, optimizer, loss_fn, train_loader, val_loader, settings, deciding, out, config or {}, clock, stack
        )
        if run.finished is not None:
            return run.finished
        run.test_loader = test_loader
        interrupts = stack.enter_context(Interrupts())
        try:
            while run.goes_on:
                run.begin_epoch()
                for batch in run.elastic.epoch(run.feed()):
                    run.shrink(batch)
                    run.count_flops(batch)
                    run.stepped(run.engine.backward(batch, share=run.group_size))
                    if run.gradients_complete:
                        run.schedule_step(skipped=not run.engine.move())
                        if interrupts.asked or run.checkpoint_due:
                            run.checkpoint()
                        if interrupts.asked:
                            raise KeyboardInterrupt
                run.end_epoch()
                if interrupts.asked:
                    raise KeyboardInterrupt
            return run.end(test_loader)
        except KeyboardInterrupt:
            run.say(run.how_to_go_on("stopped"))
            raise
        except BudgetError as error:
            raise run.of_the_run(error) from error
        except TrainingError as error:
            run.diverged(error)
            raise TrainingError(f"{error}; {run.how_to_go_on('the last good checkpoint')}") from error
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            story = explain_memory(run.elastic, step=run.record.step + 1)
            raise TrainingError(f"{story}; {run.how_to_go_on('the last good checkpoint')}") from error


def _bytes_or_none(text: str | int | None) -> int | None:
    return None if text is None else parse_bytes(text)
