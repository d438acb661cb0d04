"""Keeper: while a plan stands, run what no trained tensor reaches once for each view of a sample, and never again.

The parts are `cut` (where the model divides), `standin` (each side alone) and `kept` (the rows). Here they are put
together for the loop: a batch that the keeper has laid out is trained on by stand-ins, any other one as it always was.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from elastictrainer.budget import format_bytes
from elastictrainer.data.hashing import permutation
from elastictrainer.data.loader import Batch, Loader
from elastictrainer.metrics.memory import free_bytes
from elastictrainer.runtime.apply import unwrap
from elastictrainer.runtime.cut import Cut, LossFn, find_cut
from elastictrainer.runtime.kept import Kept, KeptType, Rows
from elastictrainer.runtime.standin import StandIns, agree

__all__ = ["Keeper"]

FILL_IMAGES = {"cpu": 16, "cuda": 256}  # images that the prefix is run on at once: large, since nothing is saved
READ = 8  # batches that are fetched to find out how long it takes
CHECKED = 4  # samples on which a cut is tried out
SMALL = 1 << 30  # what is kept in memory where no system tells how much there is


class Keeper:
    """The frozen prefix of one model on one loader.

        keeper.stand(batch)              # after a plan has been applied: divide, check, make room
        keeper.fill(epoch)               # run the prefix on what is not there yet
        for batch in keeper.batches(samples, epoch):
            keeper.loss_fn(model, batch).backward()

    Args:
        views: how many views of each image there are while features are kept. Flips take turns, so that with `flip`
            alone two lose nothing.
        memory_bytes: the most that may be kept in memory; by default half of what is free on the model's device.
        disk_bytes: what is more, but not more than this, is kept in a file in `folder`, mapped; a resumed run finds it
            again. What would take still more is not kept at all.
        dtype: in which features are kept.
        precision: `"bf16"` computes them under autocast: faster where the device has it, and as far off as bf16 is.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        loader: Loader,
        *,
        memory_bytes: int | None = None,
        disk_bytes: int | None = None,
        folder: Path | None = None,
        views: int = 2,
        dtype: KeptType = "float16",
        precision: Literal["bf16"] | None = None,
    ) -> None:
        self.model, self.plain_loss_fn, self.loader = model, loss_fn, loader
        self.views, self.memory_bytes, self.disk_bytes, self.folder = views, memory_bytes, disk_bytes, folder
        self.dtype: KeptType = dtype
        self.precision = precision
        self.cut: Cut | None = None
        self.kept: Kept | None = None
        self._stand_ins: StandIns | None = None
        self._laid_out: Any = None
        self.hits = self.misses = 0  # of stores that are gone
        self.standing = 0
        """Changes whenever the model is divided anew, or not any more."""
        self._inner = unwrap(model)

    @property
    def active(self) -> bool:
        """Whether there is a prefix that steps are made without."""
        return self._stand_ins is not None and self.kept is not None

    @property
    def hopeless(self) -> bool:
        """Whether no plan on this model can be had without its prefix, whatever it trains."""
        return self.model is not self._inner

    @property
    def obstacle(self) -> str:
        """Why nothing is kept, in words."""
        return self.cut.obstacle if self.cut is not None else "no plan stands"

    def account(self) -> dict[str, Any]:
        """What is kept and how often it was of use, in plain types."""
        kept = self.kept
        return {
            "obstacle": self.obstacle if not self.active else None,
            "nbytes": kept.nbytes if kept is not None else 0,
            "dtype": self.dtype,
            "views": self.views,
            "hits": self.hits + (kept.hits if kept is not None else 0),
            "misses": self.misses + (kept.misses if kept is not None else 0),
        }

    # -- a plan comes and goes -----------------------------------------------------------------------------------------

    def stand(self, batch: Any) -> None:
        """Divide the model by the plan that stands, make sure that the parts do what the whole does, and make room.

        `batch` is any batch with its images. What was kept stays if it still holds: the same cut of the same weights.
        Costs about six forward passes of a few samples and one pass over the prefix's weights.
        """
        self.standing += 1
        few = tree_map(lambda leaf: leaf[:CHECKED] if isinstance(leaf, Tensor) and leaf.dim() else leaf, batch)
        few = Batch(*few) if isinstance(batch, Batch) else few
        self.cut = self._divided(few)
        if self.cut.obstacle:
            self.release()
            return
        size = len(tree_leaves(few)[0])
        self._stand_ins = StandIns(self._inner, self.cut, batch_size=size, precision=self.precision)
        back = tree_map(lambda leaf: leaf.flip(0) if isinstance(leaf, Tensor) and leaf.dim() else leaf, few)
        why = agree(self.model, self._stand_ins, self.plain_loss_fn, few, shuffled=back)
        if why:
            self.give_up(why)
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
        samples = self.loader.num_samples
        wanted = Kept.bytes_for(rows, samples=samples, views=self.views, dtype=self.dtype)
        in_memory = self._room() if self.memory_bytes is None else self.memory_bytes
        on_disk = wanted > in_memory
        most = max(in_memory, self.disk_bytes or 0) if self.folder is not None else in_memory
        if wanted > most:
            self.give_up(
                f"{format_bytes(wanted)} of features would pass the limit of {format_bytes(most)}; "
                "raise keep_bytes or keep_disk, lower views, or keep them as int8"
            )
            return
        key = self._key(rows)
        if self.kept is not None and self.kept.key == key:
            return
        self._let_go()
        file = self.folder / f"features-{key}.bin" if on_disk and self.folder is not None else None
        device = "cpu" if file is not None else next(self.model.parameters()).device
        self.kept = Kept(rows, samples=samples, views=self.views, dtype=self.dtype, device=device, file=file)
        self.kept.key = key

    def _room(self) -> int:
        """Half of what is free on the model's device, what is kept now counted as free."""
        free = free_bytes(next(self.model.parameters()).device)
        mine = self.kept.nbytes if self.kept is not None and self.kept.file is None else 0
        return SMALL if free is None else (free + mine) // 2

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

    def release(self) -> None:
        """Give the room back; until the next `stand`, batches are trained on as they always were."""
        self._stand_ins, self._laid_out = None, None
        self.standing += 1
        self._let_go()

    def _let_go(self) -> None:
        if self.kept is not None:
            self.hits, self.misses = self.hits + self.kept.hits, self.misses + self.kept.misses
            self.kept.forget()
            self.kept = None

    # -- features ------------------------------------------------------------------------------------------------------

    @property
    def groups(self) -> int:
        """How many groups of samples there are; the prefix is run on a group at a time."""
        return -(-self.loader.num_samples // self.group_size)

    def fill(
        self,
        epoch: int,
        *,
        first: int = 0,
        groups: int | None = None,
        going_on: Callable[[], bool] = lambda: True,
    ) -> int:
        """Run the prefix on the samples of these groups as this epoch sees them, where they are not kept yet.

        Groups are always the same samples in the same order, drawn by lot: a row has the same bits whenever it is made,
        and some of the groups are a fair sample of all. Returns how many images went through. `going_on` is asked
        between groups: False ends it early, with what has been done kept.
        """
        assert self.kept is not None
        assert self._stand_ins is not None
        size, loader = self.group_size, self.loader
        lot = permutation(loader.seed, -1, loader.num_samples)
        lot = lot[first * size :] if groups is None else lot[first * size : (first + groups) * size]
        parts = [lot[k : k + size] for k in range(0, len(lot), size)]
        wanted = [part for part in parts if self.kept.missing(part, self._codes(part, epoch)).any()]
        if not wanted:
            return 0
        done = 0
        looked = loader.look(np.concatenate(wanted), epoch, batch_size=size, views=self.views)
        for part, batch in zip(wanted, looked):
            self.kept.put(part, self._codes(part, epoch), self._stand_ins.collect(self.plain_loss_fn, batch))
            done += len(part)
            if not going_on():
                break
        self.kept.misses += done
        return done

    def read_s(self, epoch: int) -> float:
        """What fetching a batch of what is kept takes now; the least of a few times. Costs these."""
        assert self.kept is not None
        order = self.loader.order(epoch)
        some = order[self.kept_of(order, epoch)][: READ * self.loader.batch_size]
        best = math.inf
        for start in range(0, len(some), self.loader.batch_size):
            here = some[start : start + self.loader.batch_size]
            began = time.perf_counter()
            rows = self.kept.get(here, self._codes(here, epoch))
            if rows and rows[0].is_cuda:
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - began)
        self.kept.hits -= len(some)  # asked for no step's sake
        return best if len(some) else 0.0

    def give_up(self, why: str) -> None:
        """Keep nothing under the plan that stands."""
        self.cut = Cut(obstacle=why)
        self.release()

    @property
    def group_size(self) -> int:
        return FILL_IMAGES.get(next(self.model.parameters()).device.type, 16)

    def kept_of(self, samples: NDArray[np.int64], epoch: int) -> NDArray[np.bool_]:
        """Which of these samples, as this epoch sees them, are kept."""
        assert self.kept is not None
        return ~self.kept.missing(samples, self._codes(samples, epoch))

    def _codes(self, samples: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        return self.loader.codes(samples, epoch, views=self.views)

    def batches(self, samples: NDArray[np.int64], epoch: int) -> Iterator[Batch]:
        """Batches of these samples, laid out for `loss_fn`. All of them must be kept."""
        assert self.kept is not None
        # Once for all of them: a copy to a GPU waits for all that it has been asked to do.
        places = self.kept.places(samples, self._codes(samples, epoch)).split(self.loader.batch_size)
        for batch, at in zip(self.loader.look(samples, epoch, views=self.views, pixels=False), places):
            self._laid_out = (batch, at)
            yield batch
        self._laid_out = None

    def inputs(self, batch: Any) -> tuple[Any, tuple[Tensor, ...]]:
        """All that the loss of a batch is a function of: the batch, and what was kept of it if it is laid out.

        Fetched at each call: what trains may write into it.
        """
        if self._laid_out is None or self._laid_out[0] is not batch or self._stand_ins is None or self.kept is None:
            return batch, ()
        device = next(self.model.parameters()).device  # what is kept in a file comes from there by way of the host
        return batch, tuple(rows.to(device, non_blocking=True) for rows in self.kept.rows_at(self._laid_out[1]))

    def loss_of(self, model: nn.Module, inputs: tuple[Any, tuple[Tensor, ...]]) -> Tensor:
        """The task's loss of what `inputs` gave."""
        batch, rows = inputs
        if not rows:
            return self.plain_loss_fn(model, batch)
        assert self._stand_ins is not None
        with self._stand_ins.standing_in(rows):
            return self.plain_loss_fn(model, batch)

    def loss_fn(self, model: nn.Module, batch: Any) -> Tensor:
        """The task's loss; for the batch that is laid out, by what was kept of it."""
        return self.loss_of(model, self.inputs(batch))
