"""One small hierarchy: a message says what happened, the offending value, and what to do."""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "ElasticTrainerError",
    "ModelError",
    "ProfileError",
    "TrainingError",
]


class ElasticTrainerError(Exception):
    """Anything this library refuses to do. The command line prints its message as one line and exits with 1."""

    exit_code = 1


class ConfigError(ElasticTrainerError, ValueError):
    """Wrong use: an option or argument that cannot be right whatever the machine or data. Exits with 2."""

    exit_code = 2


class BudgetError(ElasticTrainerError, ValueError):
    """The budget cannot be met; `least` is the smallest one that can, in the unit that was asked for.

    `of` says which budget was short: `"time"` (`least` is a share or seconds) or `"memory"` (bytes).
    """

    def __init__(self, message: str, *, least: float | None = None, of: str = "time") -> None:
        super().__init__(message)
        self.least, self.of = least, of


class DataError(ElasticTrainerError):
    """A dataset or an image that cannot be used, named by its path."""


class ModelError(ElasticTrainerError):
    """A model or a weights file that cannot be used, with the module or tensors named."""


class ProfileError(ElasticTrainerError):
    """A model whose step cannot be traced or timed, or a profile that does not belong to it."""


class CheckpointError(ElasticTrainerError):
    """A run folder or checkpoint that cannot be read, written or continued."""


class TrainingError(ElasticTrainerError):
    """Training had to stop: a loss that is not finite, no memory left. The last good checkpoint is kept."""
