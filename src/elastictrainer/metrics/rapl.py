"""The energy counters of Intel and AMD processors, by Linux's powercap files (RAPL)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elastictrainer.errors import ConfigError, ElasticTrainerError

__all__ = ["RaplMeter", "Zone"]

POWERCAP = Path("/sys/class/powercap")
MOST_WATTS = 2000.0
"""More than a socket ever draws: a counter that is read again before that could fill it has wrapped at most once."""


@dataclass(frozen=True, slots=True)
class Zone:
    """One counter of microjoules, which starts again from 0 after `range_uj`."""

    path: Path
    name: str
    range_uj: int

    def read_uj(self) -> int:
        counter = self.path / "energy_uj"
        try:
            return int(counter.read_text())
        except PermissionError as error:
            raise ElasticTrainerError(
                f"only root may read {counter}; allow it with: sudo chmod a+r {counter}"
            ) from error
        except (OSError, ValueError) as error:
            raise ElasticTrainerError(f"cannot read {counter}: {error}") from error


class RaplMeter:
    """Every processor package and, where it is counted apart, its memory.

    Idle draw and other processes are in it; disks, screens, GPUs and losses in the supply are not. Counters wrap (every
    40 minutes or so at 100 W), so while it runs a thread reads them now and then; that costs microseconds a minute.
    """

    def __init__(self, zones: Sequence[Zone]) -> None:
        self._zones = tuple(zones)
        self._last: dict[Zone, int] | None = None
        self._total_uj = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._broken = False
        for zone in self._zones:
            zone.read_uj()  # what may not be read says so now

    @classmethod
    def of_system(cls, root: Path = POWERCAP) -> RaplMeter:
        """All that this machine counts."""
        zones = []
        # "intel-rapl" is also what AMD's counters are called; "intel-rapl-mmio" shows the same packages again.
        for path in sorted(root.glob("intel-rapl:*")):
            try:
                name = (path / "name").read_text().strip()
                limit = int((path / "max_energy_range_uj").read_text())
            except (OSError, ValueError):
                continue
            # Not "core" and "uncore", which are parts of their package, nor "psys", which holds the packages.
            if name.startswith("package") or name == "dram":
                zones.append(Zone(path, name, limit))
        if not zones:
            raise ElasticTrainerError(f"no processor counts its energy under {root} (RAPL)")
        return cls(zones)

    @property
    def covers(self) -> str:
        return f"{', '.join(zone.name for zone in self._zones)}, by RAPL"

    def begin(self) -> None:
        self._stop.set()  # where an earlier measurement was begun and never ended
        self._stop = threading.Event()
        with self._lock:
            self._total_uj, self._broken = 0, False
            self._last = self._read()
        period_s = min(zone.range_uj for zone in self._zones) / 1e6 / MOST_WATTS
        threading.Thread(target=self._keep_up, args=(self._stop, period_s), name="rapl", daemon=True).start()

    def end(self) -> float | None:
        if self._last is None:
            raise ConfigError("the meter was not begun; call begin() first")
        self._stop.set()
        self.sample()
        self._last = None
        return None if self._broken else self._total_uj / 1e6

    def sample(self) -> None:
        """Read the counters and add what they moved by; a counter that cannot be read spoils the measurement."""
        with self._lock:
            if self._last is None:
                return
            now = self._read()
            for zone in self._zones:
                moved = now[zone] - self._last[zone]
                self._total_uj += moved if moved >= 0 else moved + zone.range_uj
            self._last = now

    def _read(self) -> dict[Zone, int]:
        try:
            return {zone: zone.read_uj() for zone in self._zones}
        except ElasticTrainerError:
            self._broken = True
            return dict.fromkeys(self._zones, 0)

    def _keep_up(self, stop: threading.Event, period_s: float) -> None:
        while not stop.wait(period_s):
            self.sample()
