"""Fine-tune a pretrained network within the time, memory and energy you have."""

from __future__ import annotations

from elastictrainer import importance, metrics, policies
from elastictrainer.backward import BackwardPrices
from elastictrainer.budget import Budget
from elastictrainer.errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    DataError,
    ElasticTrainerError,
    ModelError,
    ProfileError,
    TrainingError,
)
from elastictrainer.plan import Plan
from elastictrainer.profiling import Profile, price_backward, profile, time_backward
from elastictrainer.runtime.apply import Applied, apply
from elastictrainer.runtime.controller import Elastic
from elastictrainer.runtime.loop import fit
from elastictrainer.runtime.result import Result
from elastictrainer.selection import select, select_channels

__version__ = "0.1.0"

__all__ = [
    "Applied",
    "BackwardPrices",
    "Budget",
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Elastic",
    "ElasticTrainerError",
    "ModelError",
    "Plan",
    "Profile",
    "ProfileError",
    "Result",
    "TrainingError",
    "__version__",
    "apply",
    "fit",
    "importance",
    "metrics",
    "policies",
    "price_backward",
    "profile",
    "select",
    "select_channels",
    "time_backward",
]
