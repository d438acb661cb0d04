"""Features: what a run keeps for its stages; what making it costs by now, and for how many samples there is time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from elastictrainer.data.loader import Loader
from elastictrainer.policies.adaptive import Keeping
from elastictrainer.runtime.cut import LossFn
from elastictrainer.runtime.keeper import Keeper
from elastictrainer.runtime.kept import KeptType

__all__ = ["Features", "Keep"]

SHARE = 0.5  # of the time left at most goes into the features below the head
REBUILD = 0.7  # what the prefix alone is taken to cost beside its part of a training step, until it has been timed
TRIED_GROUPS = 4  # groups of images from which that is learned
FIXED_BYTES = 2 << 30  # where no decision may rest on what happens to be free


@dataclass(frozen=True, slots=True)
class Keep:
    """How features are kept: up to `views` of each image, as `dtype`, up to `memory_bytes` in the device's memory (by
    default half of what is free there), beyond that up to `disk_bytes` in a file in `folder`. `precision="bf16"`
    computes them under autocast. `allowed=False` keeps none."""

    views: int = 2
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    dtype: KeptType = "float16"
    precision: Literal["bf16"] | None = None
    allowed: bool = True
    folder: Path | None = None


class Features:
    """A run's `Keeper`, if its loader and options let features be kept, and what has been learned of it.

    `rebuild` is what running the prefix costs beside its part of a training step; `groups` of samples there was time
    for. With `deterministic` neither rests on a clock.
    """

    def __init__(
        self, keep: Keep, model: nn.Module, loss_fn: LossFn, loader: Any, *, bn: str, deterministic: bool
    ) -> None:
        self.keep, self._loss_fn, self._deterministic = keep, loss_fn, deterministic
        self.keeper: Keeper | None = None
        # Statistics that move with every batch make no two passes of a prefix alike.
        if keep.allowed and isinstance(loader, Loader) and bn != "track":
            most = FIXED_BYTES if keep.memory_bytes is None and deterministic else keep.memory_bytes
            self.keeper = Keeper(
                model, loss_fn, loader,
                views=keep.views, memory_bytes=most, disk_bytes=keep.disk_bytes, dtype=keep.dtype,
                folder=keep.folder, precision=keep.precision,
            )  # fmt: skip
        self.rebuild = REBUILD
        self.groups: int | None = None

    @property
    def possible(self) -> bool:
        """Whether there is a plan on this model and loader whose prefix could be kept."""
        return self.keeper is not None and not self.keeper.hopeless

    @property
    def keeping(self) -> Keeping:
        """For the prices of plans."""
        return Keeping(views=self.keep.views, rebuild=self.rebuild)

    @property
    def share(self) -> float:
        """Of the samples, those whose features there was time to keep."""
        return 1.0 if self.groups is None or self.keeper is None else self.groups / self.keeper.groups

    def stand(self, batch: Any, *, views: int) -> bool:
        """Divide the model by the plan that stands; whether anything can be kept of it, in so many views."""
        assert self.keeper is not None
        self.keeper.views = views
        self.keeper.stand(batch)
        return self.keeper.active

    def fill(self, epoch: int, *, prefix_s: float, left_s: Callable[[], float], took_s: Callable[[], float]) -> bool:
        """Features for the epoch that begins, of as many samples as there is time for; False if fetching them is no
        gain. `prefix_s` is the prefix's part of a training step's forward pass, by the profile; `took_s` the time since
        this was asked for."""
        keeper = self.keeper
        assert keeper is not None
        done = keeper.fill(epoch, groups=TRIED_GROUPS)
        if done and not self._deterministic:
            if prefix_s > 0:
                self.rebuild = took_s() / done * keeper.loader.batch_size / prefix_s
            if keeper.read_s(epoch) > self.rebuild * prefix_s:
                keeper.give_up("reading features back takes longer than computing them")
                return False
        if self.groups is None:
            group_s = self.rebuild * prefix_s * keeper.group_size / keeper.loader.batch_size
            self.groups = min(max(int(SHARE * left_s() / max(group_s, 1e-12)), TRIED_GROUPS), keeper.groups)
        keeper.fill(
            epoch, first=TRIED_GROUPS, groups=self.groups - TRIED_GROUPS,
            going_on=lambda: self._deterministic or left_s() > 0,
        )  # fmt: skip
        return True

    # -- steps ---------------------------------------------------------------------------------------------------------

    def inputs(self, batch: Any) -> Any:
        """All that a batch's loss is a function of: what was kept of it, too."""
        return (batch, ()) if self.keeper is None else self.keeper.inputs(batch)

    def loss_of(self, model: nn.Module, inputs: Any) -> Tensor:
        """The loss to train by, of what `inputs` gave."""
        return self._loss_fn(model, inputs[0]) if self.keeper is None else self.keeper.loss_of(model, inputs)

    @property
    def standing(self) -> int | None:
        return self.keeper.standing if self.keeper is not None else None

    def release(self) -> None:
        if self.keeper is not None:
            self.keeper.release()

    def account(self) -> dict[str, Any] | None:
        return None if self.keeper is None else self.keeper.account()
