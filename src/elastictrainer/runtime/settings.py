"""The loop's options, checked together, and what a resumed run must agree in."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from elastictrainer.budget import Budget
from elastictrainer.errors import ConfigError
from elastictrainer.policies import Policy, find_policy
from elastictrainer.policies.adaptive import ADAPTIVE
from elastictrainer.runtime.apply import unwrap
from elastictrainer.runtime.evaluate import Metric
from elastictrainer.runtime.interval import Interval

__all__ = ["Settings", "batch_size", "configuration", "length"]


@dataclass(frozen=True, slots=True)
class Settings:
    """The loop's own options; what they mean is said at `fit`."""

    epochs: int
    accumulate: int
    clip: float | None
    autocast: Literal["bf16", "fp16"] | None
    early_stop: int | None
    seed: int
    deterministic: bool
    checkpoint_every_s: float
    resume: bool
    scheduler: Any
    metric: Metric | Literal["auto"] | None
    progress: bool
    tensorboard: bool
    weights_metadata: dict[str, str]
    graphs: bool = True

    def check(self, *, has_validation: bool, has_folder: bool, steps_per_epoch: int | None) -> None:
        """Everything wrong with them, in one error."""
        wrong = []
        if self.epochs < 1:
            wrong.append(f"epochs {self.epochs} must be at least 1")
        if self.accumulate < 1:
            wrong.append(f"accumulate {self.accumulate} must be at least 1")
        if self.clip is not None and not self.clip > 0:
            wrong.append(f"clip {self.clip} must be above 0")
        if self.autocast not in (None, "bf16", "fp16"):
            wrong.append(f"autocast {self.autocast!r} is neither 'bf16' nor 'fp16'")
        if self.early_stop is not None and not has_validation:
            wrong.append("early_stop needs a val_loader: stopping by the test data would be choosing on them")
        if self.early_stop is not None and self.early_stop < 1:
            wrong.append(f"early_stop {self.early_stop} must be at least 1 epoch")
        if self.resume and not has_folder:
            wrong.append("resume needs out=, the folder to go on in")
        if self.tensorboard and not has_folder:
            wrong.append("tensorboard needs out=, the folder to write into")
        if steps_per_epoch is None and (self.scheduler == "cosine" or self.accumulate > 1):
            wrong.append("the loader has no length: pass scheduler=None and accumulate=1, which do without")
        if steps_per_epoch == 0:
            wrong.append("the train_loader is empty")
        if wrong:
            raise ConfigError("; ".join(wrong))


def configuration(
    model: nn.Module, optimizer: Optimizer, loader: Iterable[Any], settings: Settings, deciding: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that shapes a run, in plain types: `config.yaml`, which a resumed run must agree with.

    Left out is what may change between two sessions of a run without changing it: where a profile is cached, how often
    checkpoints are written, what is shown.
    """
    policy = find_policy(deciding["policy"])
    pin = deciding["pin"]
    schedule = settings.scheduler
    return {
        "epochs": settings.epochs,
        "budget": str(Budget.parse(deciding["budget"])) if policy.within_budget else None,
        "policy": policy.name,
        "importance": (policy.importance or deciding["importance"]) if policy.needs_scores else None,
        "interval": str(Interval.parse(deciding["interval"])) if policy.replans or policy.shrinks else None,
        "pin": _name(pin) if callable(pin) or isinstance(pin, str) else list(pin),
        "probe_batches": deciding["probe_batches"],
        "gradient_from": _source(deciding["gradient_from"]) if policy.needs_scores else None,
        "memory": deciding["memory"],
        "bn": deciding["bn"],
        "resting_state": deciding["resting_state"],
        **_keeping(policy, deciding.get("keep")),
        "feedback": deciding["feedback"] and not settings.deterministic,
        "optimizer": _optimizer(optimizer, scheduled=schedule is not None),
        "scheduler": schedule if schedule is None or isinstance(schedule, str) else type(schedule).__name__,
        "accumulate": settings.accumulate,
        "clip": settings.clip,
        "autocast": settings.autocast,
        "early_stop": settings.early_stop,
        "metric": settings.metric
        if settings.metric is None or isinstance(settings.metric, str)
        else _name(settings.metric),
        "graphs": settings.graphs,
        "seed": settings.seed,
        "deterministic": settings.deterministic,
        "network": _network(model),
        "batch_size": batch_size(loader),
        "batches_per_epoch": length(loader),
    }


def _keeping(policy: Policy, keep: Any) -> dict[str, Any]:
    if policy is not ADAPTIVE or keep is None:
        return {}
    return {"keep": keep.allowed, "views": keep.views, "keep_bytes": keep.memory_bytes, "keep_disk": keep.disk_bytes,
            "keep_as": keep.dtype, "keep_with": keep.precision}  # fmt: skip


def _source(gradient_from: Any) -> str:
    return gradient_from if isinstance(gradient_from, str) else f"a loader of {length(gradient_from)} batches"


def length(loader: Iterable[Any]) -> int | None:
    """Batches in an epoch, where the loader knows."""
    try:
        return len(loader)  # type: ignore[arg-type]  # what has no length raises
    except TypeError:
        return None


def batch_size(loader: Iterable[Any]) -> int | None:
    """Samples in a batch, where the loader says."""
    size = getattr(loader, "batch_size", None)
    return int(size) if size is not None else None


def _optimizer(optimizer: Optimizer, *, scheduled: bool) -> dict[str, Any]:
    plain = (bool, int, float, str, type(None))
    groups = []
    for group in optimizer.param_groups:
        options = {
            k: list(v) if isinstance(v, tuple) else v for k, v in group.items() if k not in ("params", "initial_lr")
        }
        if scheduled:
            # Of an optimizer that has been stepped already (a notebook goes on after Ctrl-C) the rate has moved.
            options["lr"] = group.get("initial_lr", group["lr"])
        groups.append(
            {k: v for k, v in options.items() if isinstance(v, (*plain, list))} | {"tensors": len(group["params"])}
        )
    return {"name": type(optimizer).__name__, "groups": groups}


def _network(model: nn.Module) -> dict[str, Any]:
    inner = unwrap(model)
    tensors = [
        f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in inner.state_dict().items()
        if hasattr(tensor, "shape")
    ]
    digest = hashlib.sha256("\n".join(tensors).encode()).hexdigest()[:16]
    return {"class": type(inner).__name__, "tensors": len(tensors), "structure": digest}


def _name(function: Any) -> str:
    """The same in another process: what a partial or a callable object prints as holds an address in memory."""
    if isinstance(function, str):
        return function
    if isinstance(function, functools.partial):
        return _name(function.func)
    return str(getattr(function, "__qualname__", type(function).__qualname__))
