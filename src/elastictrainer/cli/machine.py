"""`--device --threads --seed --deterministic`, made true in one place for every verb that computes."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

from elastictrainer.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["prepare", "resolve_device"]


def prepare(
    device: str = "auto", *, threads: int | None = None, seed: int = 0, deterministic: bool = False
) -> torch.device:
    """Set torch's threads, seeds and determinism for this process, and return the device to work on.

    `auto` takes a CUDA device, then Apple's, then the CPU. Deterministic kernels cost speed on CUDA, and little or
    nothing on a CPU; an operation that has no deterministic kernel raises when it is reached.
    """
    import numpy as np
    import torch

    if seed >= 2**63:
        raise ConfigError(f"seed {seed} is more than torch's generators take; use one below 2**63")
    if threads is not None:
        torch.set_num_threads(threads)
    if deterministic:
        # cuBLAS reads this when it starts, which is after this line and before the first matrix product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global stream is what foreign transforms draw from
    torch.manual_seed(seed)
    return resolve_device(device)


def resolve_device(name: str) -> torch.device:
    """The device of this name, tried with an empty tensor; `auto` takes CUDA, then Apple's, then the CPU."""
    import torch

    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it computes nothing")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        # torch says at length what a wrong name could have been, and says "not compiled with CUDA" by an assertion.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        reason = reason.partition(". ")[0].rstrip(".")
        raise ConfigError(
            f"device {name!r} cannot be used: {reason}; `elastictrainer doctor` shows what there is"
        ) from error
    return device
