"""Adapt to a folder of one's own images, and leave a run folder as any run does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from elastictrainer.data.episodes import Bank, all_classes
from elastictrainer.data.models import LoadedModel, load_model
from elastictrainer.errors import ConfigError
from elastictrainer.fewshot.heads import Prototypes, last_linear
from elastictrainer.fewshot.learner import Learner, Outcome, Settings
from elastictrainer.fewshot.methods import Ceilings, find_method
from elastictrainer.plan import Plan
from elastictrainer.report import write_report
from elastictrainer.runtime.result import Result, versions
from elastictrainer.runtime.run_folder import RunFolder

__all__ = ["adapt_folder", "read_scheme"]


def adapt_folder(
    model: str,
    data: str,
    out: Path,
    *,
    shots: int,
    method: str,
    settings: Settings,
    ceilings: Ceilings,
    scheme: Path | None = None,
    weights: str | None = None,
    model_options: Sequence[str] | None = None,
    normalize: str | None = None,
    image_size: int | None = None,
    device: torch.device,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[dict[str, Any], Outcome, Outcome]:
    """The result as `result.json` holds it, and how the network did before and after.

    Raises:
        ConfigError: the method adds modules to the network.
        DataError: fewer than two classes, a class with a single image.
        BudgetError: a ceiling is too low; the least that works is stated.
    """
    if find_method(method).lite:
        raise ConfigError(
            f"{method} adds modules to the network, which its weights file could not hold; compare it with "
            "`elastictrainer fewshot`, or adapt by --method bias"
        )
    shape = load_model(model, weights=weights, image_size=image_size, model_options=model_options, normalize=normalize)
    # Where the images come in splits, those of train: a test set is not for learning.
    bank = Bank(
        data, image_size=image_size or shape.image_size, normalisation=shape.normalisation, split="train",
        seed=settings.seed, device=device,
    )  # fmt: skip
    task = all_classes(bank.labels, bank.classes, shots=shots, seed=settings.seed)
    network = load_model(
        model, num_classes=len(bank.classes), weights=weights, image_size=bank.image_size,
        model_options=model_options, normalize=normalize, seed=settings.seed,
    )  # fmt: skip
    network.model.to(device)
    say(str(network))
    say(
        f"{bank.name}: {len(bank.classes)} classes, {len(task.support)} images to learn from, "
        f"{len(task.query)} to be judged by"
    )
    head = Prototypes(last_linear(network.model, network.head))
    learner = Learner(
        network.model, head, bank, settings=settings, ceilings=ceilings, scheme=read_scheme(scheme)
    )  # fmt: skip
    before = learner.solve(find_method("none"), task, 0)
    config = {
        "verb": "adapt", "model": network.name, "weights": network.source, "data": bank.name, "classes": bank.classes,
        "fingerprint": bank.fingerprint, "image_size": bank.image_size, "shots": shots, "policy": method,
        "memory": ceilings.memory, "compute": ceilings.compute, **asdict(settings),
    }  # fmt: skip
    config = {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}
    with ExitStack() as stack:
        opened: list[RunFolder] = []

        def begin() -> None:
            """Only now: ceilings that nothing fits leave no folder behind."""
            opened.append(RunFolder.create(out, config, environment=versions(device)))
            stack.callback(opened[0].close)

        start = time.perf_counter()
        after = learner.learn(find_method(method), task, 0, on_plan=begin)
        eval_s = time.perf_counter() - start - after.decide_s - after.steps_s
        assert after.answers is not None
        head.into_head(network.model, after.answers)
        result = _result(after, before, settings, config, out, device, eval_s).to_dict()
        _write(opened[0], after, network, result)
    return result, before, after


def read_scheme(path: Path | None) -> Plan | None:
    """A plan from a JSON file."""
    if path is None:
        return None
    try:
        return Plan.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"scheme {str(path)!r} cannot be read: {error.strerror}") from error


def _write(folder: RunFolder, after: Outcome, network: LoadedModel, result: dict[str, Any]) -> None:
    step_s = after.steps_s / max(len(after.losses), 1)
    for step, loss in enumerate(after.losses, start=1):
        last = step == len(after.losses)
        line = {
            "epoch": step, "step": step, "loss": loss, "train_s": after.decide_s + step * step_s,
            "val_accuracy": after.accuracy if last else None, "val_loss": None,
        }  # fmt: skip
        folder.log("metrics.jsonl", line)
    if after.plan is not None:
        scores = after.plan.scores
        event = {**result["plans"][0], "plan": after.plan.to_dict(), "scores": scores}
        folder.log("plans.jsonl", event)
    folder.write_weights("model.safetensors", network.model.state_dict(), network.metadata())
    folder.write_json("result.json", json.loads(json.dumps(result, default=str)))
    write_report(folder.path)


def _result(
    after: Outcome, before: Outcome, settings: Settings, config: dict[str, Any], out: Path, device: torch.device,
    eval_s: float,
) -> Result:  # fmt: skip
    """As any run's, with None for what a run of a few steps does not measure."""
    plan, steps = after.plan, len(after.losses)
    plans: list[dict[str, Any]] = []
    if plan is not None:
        plans.append(
            {
                "index": 0, "epoch": 0, "step": 0, "reason": "first", "similarity": None, "id": plan.id,
                "tensors": len(plan.trainable), "share_trained": None, "predicted_step_s": None,
                "predicted_ratio": None, "peak_bytes": plan.peak_bytes, "steps": steps, "spent_s": after.steps_s,
            }
        )  # fmt: skip
    spent, full = (None, None) if plan is None else (plan.backward, plan.full_backward)
    return Result(
        policy=after.method,
        importance={"tinytrain": "fisher potential", "elastic": "elastic"}.get(after.method),
        budget=None,
        seed=settings.seed,
        device=versions(device)["device"],
        torch=str(torch.__version__),
        epochs=steps,
        batch_size=settings.batch_size,
        steps=steps,
        train_s=after.decide_s + after.steps_s,
        eval_s=eval_s,
        full_step_s=None,
        step_s=after.steps_s / steps if steps else None,
        predicted_ratio=None,
        measured_ratio=None,
        accuracy={"per_epoch": [], "final": after.accuracy, "of": "queries", "before": before.accuracy},
        loss={"per_epoch": list(after.losses), "val": [], "final": after.losses[-1] if steps else None},
        best_epoch=None,
        overhead_s={"decide": after.decide_s},
        peak_bytes=None,
        deciding_peak_bytes=None,
        flops=None,
        energy_j=None,
        energy_meter="none",
        resting_state_bytes={},
        plans=plans,
        profile_error={},
        restarts=0,
        config={
            **config,
            "backward": None if spent is None else {**asdict(spent), "nbytes": spent.nbytes},
            "full_backward": None if full is None else {**asdict(full), "nbytes": full.nbytes},
        },
        folder=str(out),
    )
