"""Result: the outcome of a run, as `result.json` holds it."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = ["Record", "Result", "versions"]


@dataclass(slots=True)
class Record:
    """What a run has been through so far: the part of a checkpoint that is neither weights nor controller."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    optimizer_steps: int = 0
    loss_total: float = 0.0
    loss_count: int = 0
    eval_s: float = 0.0
    evaluations: int = 0
    evaluated_batches: int = 0
    checkpoint_s: float = 0.0
    checkpoints: int = 0
    energy_j: float | None = None
    peak_bytes: int | None = None
    deciding_peak_bytes: int | None = None
    flops_by_plan: dict[str, int | None] = field(default_factory=dict)
    scores: list[dict[str, Any] | None] = field(default_factory=list)
    """By epoch; None where it was not worth the time to evaluate."""
    losses: list[float | None] = field(default_factory=list)
    best_epoch: int | None = None
    restarts: int = 0

    def score_of(self, epoch: int | None) -> dict[str, Any] | None:
        return self.scores[epoch] if epoch is not None and 0 <= epoch < len(self.scores) else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Record:
        return cls(**data)


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a run.

    `train_s` is training with everything that deciding cost (`overhead_s`), without evaluation and checkpoints.
    `measured_ratio` is of the steps alone: their seconds over those of as many full steps. `accuracy` holds the
    validation's per epoch, and the final one of the weights that were kept, on the test data where there are any;
    `share` of its batches, if a deadline left no time for all.
    `compilations` are the graphs that `torch.compile` built since the run began or was last resumed, `graphs` what was
    recorded and replayed since then (None where steps are made as ever). What was not measured is None, never a guess.
    """

    policy: str
    importance: str | None
    budget: str | None
    seed: int
    device: str
    torch: str
    epochs: int
    batch_size: int | None
    steps: int
    train_s: float
    eval_s: float
    full_step_s: float | None
    step_s: float | None
    predicted_ratio: float | None
    measured_ratio: float | None
    accuracy: dict[str, Any]
    loss: dict[str, Any]
    best_epoch: int | None
    overhead_s: dict[str, float]
    peak_bytes: int | None
    deciding_peak_bytes: int | None
    flops: int | None
    energy_j: float | None
    energy_meter: str
    resting_state_bytes: dict[str, int]
    plans: list[dict[str, Any]]
    profile_error: dict[str, float]
    restarts: int
    config: dict[str, Any]
    folder: str | None = None
    compilations: int = 0
    features: dict[str, Any] | None = None
    graphs: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Result:
        return cls(**data)

    def __str__(self) -> str:
        final = self.accuracy.get("final")
        parts = [f"{self.policy}, {self.epochs} epochs in {self.train_s:.1f} s"]
        if final is not None:
            parts.append(f"accuracy {final:.1%} ({self.accuracy['of']})")
        if self.measured_ratio is not None:
            parts.append(f"ratio {self.measured_ratio:.3f}" + (f" of {self.budget} asked" if self.budget else ""))
        return "; ".join(parts)


def versions(device: torch.device) -> dict[str, Any]:
    """What the figures of a run depend on besides its options."""
    from elastictrainer import __version__

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": f"{device.type} ({name})",
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "elastictrainer": __version__,
        "platform": platform.platform(),
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The checkout's commit where this runs from one: read from git's files, so that git need not be installed."""
    for folder in Path(__file__).resolve().parents:
        if (folder / ".git").exists():
            return read_commit(folder / ".git")
    return None


def read_commit(git: Path) -> str | None:
    """The commit that HEAD is at. `git` is a checkout's `.git`: its folder, or in a worktree a file that names one.

    A branch is a file of its own, or after `git pack-refs` a line among others.
    """
    try:
        if git.is_file():
            git = git.parent / git.read_text().removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        branch = head.removeprefix("ref: ")
        shared = git / (git / "commondir").read_text().strip() if (git / "commondir").is_file() else git
        if (shared / branch).is_file():
            return (shared / branch).read_text().strip()
        packed = (shared / "packed-refs").read_text().splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {branch}")), None)
    except (OSError, UnicodeDecodeError):
        return None
