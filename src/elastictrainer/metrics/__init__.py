"""What a run costs: seconds, bytes, floating-point operations, joules. Measured, or None."""

from __future__ import annotations

from elastictrainer.metrics.energy import EnergyMeter, NoMeter, ReplayMeter, find_meter
from elastictrainer.metrics.flops import StepFlops, count_flops, step_flops
from elastictrainer.metrics.memory import Peak, PeakMemory
from elastictrainer.metrics.nvml import NvmlMeter
from elastictrainer.metrics.rapl import RaplMeter
from elastictrainer.metrics.timing import Stopwatch, synchronize

__all__ = [
    "EnergyMeter",
    "NoMeter",
    "NvmlMeter",
    "Peak",
    "PeakMemory",
    "RaplMeter",
    "ReplayMeter",
    "StepFlops",
    "Stopwatch",
    "count_flops",
    "find_meter",
    "step_flops",
    "synchronize",
]
