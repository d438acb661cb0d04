"""Fine-tune a pretrained network within the time, memory and energy you have."""

from __future__ import annotations

from elastictrainer import importance, metrics
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
from elastictrainer.profiling import Profile, profile
from elastictrainer.runtime.apply import Applied, apply

__version__ = "0.1.0"

__all__ = [
    "Applied",
    "Budget",
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "ElasticTrainerError",
    "ModelError",
    "Profile",
    "ProfileError",
    "TrainingError",
    "__version__",
    "apply",
    "importance",
    "metrics",
    "profile",
]
