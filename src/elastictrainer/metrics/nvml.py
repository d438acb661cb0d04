"""The energy counter of an NVIDIA GPU, by the driver's own library: nothing to install."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

from elastictrainer.errors import ConfigError, ElasticTrainerError

__all__ = ["NvmlMeter"]


class NvmlMeter:
    """Millijoules of the whole board since the driver was loaded, as NVML counts them (Volta and newer).

    Idle draw and other processes on the same GPU are in it; the host is not.
    """

    def __init__(self, uuid: str, *, name: str = "GPU", library: Any = None) -> None:
        self._library = _load() if library is None else library
        self._name = name
        self._begun = False
        self._start: int | None = None
        self._handle = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._handle))
        self._read()  # a GPU without the counter says so now

    @classmethod
    def of(cls, device: torch.device) -> NvmlMeter:
        """The meter of a CUDA device, found by its UUID: NVML's order is not CUDA's."""
        if not torch.cuda.is_available():
            raise ElasticTrainerError("CUDA is not available")
        properties = torch.cuda.get_device_properties(device)
        return cls(f"GPU-{properties.uuid}", name=properties.name)

    @property
    def covers(self) -> str:
        return f"the whole {self._name} board, by NVML"

    def begin(self) -> None:
        self._begun, self._start = True, self._reading()

    def end(self) -> float | None:
        if not self._begun:
            raise ConfigError("the meter was not begun; call begin() first")
        start, now = self._start, self._reading()
        self._begun = False
        if start is None or now is None or now < start:  # less than before: the driver was loaded again
            return None
        return (now - start) / 1e3

    def _reading(self) -> int | None:
        try:
            return self._read()
        except ElasticTrainerError:
            return None

    def _read(self) -> int:
        millijoules = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(millijoules))
        return millijoules.value

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, function)(*arguments)
        if code != 0:
            describe = self._library.nvmlErrorString
            describe.restype = ctypes.c_char_p
            raise ElasticTrainerError(f"{function}: {describe(code).decode()}")


def _load() -> Any:
    name = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise ElasticTrainerError(f"the NVIDIA driver's {name} cannot be loaded: {error}") from error
