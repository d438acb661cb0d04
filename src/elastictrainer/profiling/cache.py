"""Profiles kept on disk, found again only where nothing that changes the answer has changed."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from elastictrainer.errors import ProfileError
from elastictrainer.profiling.fingerprint import behaviour, code, shapes
from elastictrainer.profiling.profile import FORMAT, Profile

__all__ = ["Cache", "describe", "differences"]


def describe(
    model: nn.Module,
    candidates: Mapping[str, nn.Parameter],
    batch: Any,
    *,
    loss_fn: Any,
    optimizer: Optimizer | None,
    bn: str,
) -> dict[str, Any]:
    """Everything that a profile depends on, as plain data: the same description means the same price list."""
    first = next(iter(candidates.values()))
    return {
        "format": FORMAT,
        "model": type(model).__name__,
        "structure": _structure(model, candidates),
        "batch": shapes(batch),
        "loss": code(loss_fn),
        "dtype": str(first.dtype),
        "autocast": getattr(loss_fn, "autocast", None) or _autocast(first.device.type),
        "bn": bn,
        "optimizer": _optimizer(optimizer),
        "device": device_name(first.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "flags": {
            "matmul": torch.get_float32_matmul_precision(),
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "cudnn_tf32": torch.backends.cudnn.allow_tf32,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "mkldnn": torch.backends.mkldnn.is_available(),
        },
    }


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """In which of the things that a price depends on two descriptions differ, in words; what one leaves out is equal.

    Not compared are the loss function's code, which no two programs share, and what follows from the rest. Of the
    batch the first tensor counts: whoever profiles may hand on more or less beside it.
    """
    found = []
    for key in ("dtype", "autocast", "bn", "optimizer", "device", "threads", "torch"):
        if key in there and key in here and json.dumps(there[key]) != json.dumps(here[key]):
            found.append(f"{key} {_word(there[key])}, and here {_word(here[key])}")
    one, other = _first_shape(there.get("batch")), _first_shape(here.get("batch"))
    if one is not None and other is not None and one != other:
        found.append(f"batch {'x'.join(map(str, one))}, and here {'x'.join(map(str, other))}")
    return found


def _word(value: Any) -> str:
    return str(value[0]) if isinstance(value, (list, tuple)) and value else str(value)


def _first_shape(batch: Any) -> list[int] | None:
    """The shape of the first tensor of a described batch."""
    if isinstance(batch, (list, tuple)) and len(batch) == 4 and str(batch[2]).startswith("torch."):
        return list(batch[0])
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((shape for part in parts if (shape := _first_shape(part)) is not None), None)


def device_name(device: torch.device) -> str:
    """The device as a person would name it: a GPU's model, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return str(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    told = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    named = told.get("model name") or told.get("hardware") or platform.processor() or platform.machine()
    return f"{named} ({os.cpu_count()} cores)"


def _structure(model: nn.Module, candidates: Mapping[str, nn.Parameter]) -> str:
    """A digest of modules with settings and code, parameters with shape, layout and tying, and which are candidates."""
    digest = hashlib.sha256()
    seen: dict[int, str] = {}
    for name, module in model.named_modules():
        kind = f"{type(module).__qualname__} {module.extra_repr()} {module.training}"
        digest.update(f"M {name} {kind} {behaviour(module)}\n".encode())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied = seen.setdefault(id(parameter), name)
        line = f"P {name} {tuple(parameter.shape)} {parameter.stride()} {parameter.dtype} {tied} {name in candidates}\n"
        digest.update(line.encode())
    return digest.hexdigest()


def _autocast(device: str) -> str:
    return str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else "off"


def _optimizer(optimizer: Optimizer | None) -> Any:
    if optimizer is None:
        return None
    kinds = ("momentum", "nesterov", "amsgrad", "foreach", "fused", "capturable", "centered")
    settings = [
        {k: bool(group[k]) for k in kinds if k in group} | {"n": len(group["params"])}
        for group in optimizer.param_groups
    ]
    return [type(getattr(optimizer, "optimizer", optimizer)).__name__, settings]


def _without_effort(context: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in context.items() if key != "effort"}


class Cache:
    """A folder of profiles, one file per description. Damaged or foreign files are ignored, never an error."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, context: Mapping[str, Any]) -> Path:
        key = hashlib.sha256(json.dumps(_without_effort(context), sort_keys=True).encode()).hexdigest()[:32]
        return self.folder / f"{key}.profile.json"

    def find(self, context: Mapping[str, Any]) -> Profile | None:
        """The profile of this description, if it was taken with as much effort or more."""
        path = self._path(context)
        if not path.is_file():
            return None
        try:
            found = Profile.load(path)
        except ProfileError:
            return None
        same = _without_effort(found.context) == json.loads(json.dumps(_without_effort(context)))
        return found if same and found.context.get("effort", 0) >= context.get("effort", 0) else None

    def keep(self, profile: Profile) -> None:
        """Write atomically: a reader sees the whole profile or none."""
        path = self._path(profile.context)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self.folder, suffix=".tmp", delete=False, encoding="utf-8"
            ) as file:
                file.write(profile.to_json())
            os.replace(file.name, path)
        except OSError as error:
            raise ProfileError(
                f"cannot keep the profile in {str(self.folder)!r}: {error}; pass another cache folder"
            ) from error
