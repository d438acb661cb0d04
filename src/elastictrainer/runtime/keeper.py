"""Keeper: while a plan stands, run what no trained tensor reaches once for each view of a sample, and never again.

The parts are `cut` (where the model divides), `standin` (each side alone) and `kept` (the rows). Here they are put
together for the loop: a batch that the keeper has laid out is trained on by stand-ins, any other one as it always was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from elastictrainer.budget import format_bytes
from elastictrainer.data.loader import Batch, Loader
from elastictrainer.runtime.apply import unwrap
from elastictrainer.runtime.cut import Cut, LossFn, find_cut
from elastictrainer.runtime.kept import Kept, KeptType, Rows
from elastictrainer.runtime.standin import StandIns, agree

__all__ = ["Keeper"]

FILL_IMAGES = {"cpu": 16, "cuda": 256}  # images that the prefix is run on at once: large, since nothing is saved
CHECKED = 4  # samples on which a cut is tried out


class Keeper:
    """The frozen prefix of one model on one loader.

        keeper.stand(batch)              # after a plan has been applied: divide, check, make room
        keeper.fill(samples, epoch)      # run the prefix on what is not there yet
        for batch in keeper.batches(samples, epoch):
            keeper.loss_fn(model, batch).backward()

    Args:
        views: how many views of each image there are while features are kept. Flips take turns, so that with `flip`
            alone two lose nothing.
        limit_bytes: the most that may be kept; what would take more is not kept at all.
        dtype: in which features are kept.
        folder: keep them in files here, which a resumed run finds again, rather than in memory.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        loader: Loader,
        *,
        limit_bytes: int,
        views: int = 2,
        dtype: KeptType = "float16",
        precision: Literal["bf16"] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.model, self.plain_loss_fn, self.loader = model, loss_fn, loader
        self.views, self.limit_bytes, self.folder = views, limit_bytes, folder
        self.dtype: KeptType = dtype
        self.precision = precision
        self.cut: Cut | None = None
        self.kept: Kept | None = None
        self._stand_ins: StandIns | None = None
        self._laid_out: Any = None
        self._inner = unwrap(model)

    @property
    def active(self) -> bool:
        """Whether there is a prefix that steps are made without."""
        return self._stand_ins is not None and self.kept is not None

    @property
    def obstacle(self) -> str:
        """Why nothing is kept, in words."""
        return self.cut.obstacle if self.cut is not None else "no plan stands"

    # -- a plan comes and goes -----------------------------------------------------------------------------------------

    def stand(self, batch: Any) -> None:
        """Divide the model by the plan that stands, make sure that the parts do what the whole does, and make room.

        `batch` is any batch with its images. What was kept stays if it still holds: the same cut of the same weights.
        Costs about six forward passes of a few samples and one pass over the prefix's weights.
        """
        few = tree_map(lambda leaf: leaf[:CHECKED] if isinstance(leaf, Tensor) and leaf.dim() else leaf, batch)
        few = Batch(*few) if isinstance(batch, Batch) else few
        self.cut = self._divided(few)
        if self.cut.obstacle:
            self._release()
            return
        size = len(tree_leaves(few)[0])
        self._stand_ins = StandIns(self._inner, self.cut, batch_size=size, precision=self.precision)
        back = tree_map(lambda leaf: leaf.flip(0) if isinstance(leaf, Tensor) and leaf.dim() else leaf, few)
        why = agree(self.model, self._stand_ins, self.plain_loss_fn, few, shuffled=back)
        if why:
            self.cut = Cut(obstacle=why)
            self._release()
            return
        rows = [Rows((c.shape[0] // size, *c.shape[1:]), c.dtype) for c in self.cut.crossings]
        self._make_room(rows)

    def _divided(self, batch: Any) -> Cut:
        if self.model is not self._inner:
            return Cut(obstacle=f"the model is wrapped in {type(self.model).__name__}, whose calls cannot be left out")
        cut = find_cut(self.model, self.plain_loss_fn, batch)
        if not cut.obstacle and cut.made_from - {0}:
            return Cut(obstacle="what crosses depends on more of the batch than its images")
        if not cut.obstacle and 0 in cut.live_reads:
            return Cut(obstacle="what trains reads the images themselves, too")
        return cut

    def _make_room(self, rows: list[Rows]) -> None:
        views = self.views
        one = Kept.bytes_for(rows, samples=1, views=views, dtype=self.dtype)
        samples = self.loader.num_samples
        if one * samples > self.limit_bytes:
            self.cut = Cut(
                obstacle=f"{format_bytes(one * samples)} of features would pass the limit of "
                f"{format_bytes(self.limit_bytes)}"
            )
            self._release()
            return
        key = self._key(rows)
        if self.kept is not None and self.kept.key == key:
            return
        if self.kept is not None:
            self.kept.forget()
        file = None if self.folder is None else self.folder / f"features-{key}.bin"
        device = "cpu" if file is not None else next(self.model.parameters()).device
        self.kept = Kept(rows, samples=samples, views=views, dtype=self.dtype, device=device, file=file)
        self.kept.key = key

    def _key(self, rows: list[Rows]) -> str:
        """A digest of everything that makes a row what it is: weights, cut, data and views, and how it is stored."""
        assert self.cut is not None
        loader = self.loader
        digest = hashlib.blake2b(digest_size=12)
        seen = (loader.image_size, str(loader.augment), str(loader.normalisation), loader.seed, loader.num_samples)
        stored = (rows, self.cut.folds, self.views, self.dtype, self.precision)
        digest.update(repr((seen, stored)).encode())
        for call in self.cut.prefix:
            digest.update(f"{call.module} {call.number} {call.read}".encode())
            module = self._inner.get_submodule(call.module)
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                digest.update(name.encode())
                digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _release(self) -> None:
        self._stand_ins, self._laid_out = None, None
        if self.kept is not None:
            self.kept.forget()
            self.kept = None

    # -- features ------------------------------------------------------------------------------------------------------

    def fill(self, samples: NDArray[np.int64], epoch: int, *, going_on: Callable[[], bool] = lambda: True) -> int:
        """Run the prefix for those of these samples whose view in this epoch is not kept yet; returns how many.

        Samples go through in groups that are always the same, so that a row has the same bits whenever it is made.
        `going_on` is asked between groups: False ends it early, with what has been done kept.
        """
        assert self.kept is not None
        assert self._stand_ins is not None
        missing = samples[self.kept.missing(samples, self._codes(samples, epoch))]
        self.kept.misses += len(missing)
        size = FILL_IMAGES.get(next(self.model.parameters()).device.type, 16)
        groups = np.unique(missing // size)
        count = self.loader.num_samples
        wanted = [np.arange(g * size, min((g + 1) * size, count), dtype=np.int64) for g in groups.tolist()]
        # The last group of all is shorter; it comes last, so that the loader's batches are the groups.
        everything = np.concatenate(wanted) if wanted else missing
        done = 0
        for group, batch in zip(wanted, self.loader.look(everything, epoch, batch_size=size, views=self.views)):
            self.kept.put(group, self._codes(group, epoch), self._stand_ins.collect(self.plain_loss_fn, batch))
            done += len(group)
            if not going_on():
                break
        return done

    def _codes(self, samples: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        return self.loader.codes(samples, epoch, views=self.views)

    def batches(self, samples: NDArray[np.int64], epoch: int) -> Iterator[Batch]:
        """Batches of these samples, laid out for `loss_fn`. All of them must be kept."""
        size = self.loader.batch_size
        looked = self.loader.look(samples, epoch, views=self.views, pixels=False)
        for start, batch in zip(range(0, len(samples), size), looked):
            here = samples[start : start + size]
            self._laid_out = (batch, here, self._codes(here, epoch))
            yield batch
        self._laid_out = None

    def loss_fn(self, model: nn.Module, batch: Any) -> Tensor:
        """The task's loss; for the batch that is laid out, by what was kept of it."""
        if self._laid_out is None or self._laid_out[0] is not batch or self._stand_ins is None or self.kept is None:
            return self.plain_loss_fn(model, batch)
        # Fetched at each call: what trains may write into it.
        with self._stand_ins.standing_in(self.kept.get(*self._laid_out[1:])):
            return self.plain_loss_fn(model, batch)
