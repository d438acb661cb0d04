"""The most memory that was held at once, by what the device can tell."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from elastictrainer.errors import ConfigError

__all__ = ["Peak", "PeakMemory", "available_bytes", "free_bytes"]

PROC = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class Peak:
    """`peak_bytes` at the highest, `start_bytes` at `begin()`, and what counted them.

    `"cuda allocator"`: bytes in tensors, model and optimizer included; not what the allocator holds in reserve, nor the
    CUDA context. `"resident"`: the whole process, interpreter and libraries included, so `growth_bytes` says more.
    `"resident, since the process began"`: the same where the system cannot set the mark back, as a bound from above.
    """

    peak_bytes: int
    start_bytes: int
    source: str

    @property
    def growth_bytes(self) -> int:
        return self.peak_bytes - self.start_bytes


class PeakMemory:
    """The high-water mark between `begin()` and `end()`.

    On CUDA the allocator's own (its peak statistics are reset, for everyone who reads them). On the CPU the kernel's
    `VmHWM`: what was freed and not given back to the system counts as held, so a fresh process tells most. Where the
    system keeps no mark (macOS, Windows, MPS) the answer is None.

    Cost: two small files read, or two calls of the allocator; no synchronisation.
    """

    def __init__(self, device: str | torch.device = "cpu", *, proc: Path = PROC) -> None:
        self._device = torch.device(device)
        self._proc = proc
        self._begun = False
        self._start: int | None = None
        self._source = "cuda allocator"

    def begin(self) -> None:
        self._begun = True
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._start = torch.cuda.memory_allocated(self._device)
        elif self._device.type == "cpu":
            self._source = "resident" if self._reset() else "resident, since the process began"
            self._start = self._status("VmRSS")

    def end(self) -> Peak | None:
        if not self._begun:
            raise ConfigError("the peak was not begun; call begin() first")
        self._begun = False
        if self._device.type == "cuda":
            peak: int | None = torch.cuda.max_memory_allocated(self._device)
        else:
            peak = self._status("VmHWM")
        return None if peak is None or self._start is None else Peak(peak, self._start, self._source)

    def _reset(self) -> bool:
        try:
            (self._proc / "clear_refs").write_text("5")  # the mark goes back to what is resident now; see man 5 proc
        except OSError:
            return False
        return True

    def _status(self, field: str) -> int | None:
        try:
            found = re.search(rf"^{field}:\s+(\d+) kB$", (self._proc / "status").read_text(), re.MULTILINE)
        except OSError:
            return None
        return int(found[1]) * 1024 if found else None


def available_bytes(*, root: Path = Path("/")) -> int | None:
    """What this process could still take without anything being swapped out or ended; None where no system tells.

    Linux's own estimate, and no more than the container's limit. Cost: two small files read.
    """
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    if found is None:
        return None
    free = int(found[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # no cgroup, or one that says "max"
        free = min(free, int((root / "sys/fs/cgroup/memory.max").read_text()))
    return free


def free_bytes(device: torch.device) -> int | None:
    """What tensors on this device could still take: of a GPU what nobody has and what torch has cached, else memory."""
    if device.type != "cuda":
        return available_bytes()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached
