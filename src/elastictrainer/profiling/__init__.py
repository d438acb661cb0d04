"""Trace one real step, time and weigh its parts, calibrate on real plans, cache on disk; price it by channel."""

from __future__ import annotations

from elastictrainer.profiling.clock import time_backward
from elastictrainer.profiling.layers import price_backward
from elastictrainer.profiling.measure import profile
from elastictrainer.profiling.profile import Lane, Memory, Profile, Residual, Storage

__all__ = ["Lane", "Memory", "Profile", "Residual", "Storage", "price_backward", "profile", "time_backward"]
