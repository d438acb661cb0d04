"""Record what a step launches on a GPU once, and launch all of it at once ever after (CUDA graphs).

At batch 4 a large GPU waits for its host: a step of ResNet50 is some 1,500 launches, each dearer to ask for than to do.
What a graph can hold is work that is the same at every replay and asks the device for nothing: no `.item()`, no copy to
the host, no shape that hangs on a value. Tensors it reads and writes must stay where they were in memory.
"""

from __future__ import annotations

import functools
import gc
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["CudaRecorder", "Recorder", "Uncapturable", "brief_collections", "find_recorder"]


class Uncapturable(Exception):
    """This work cannot be recorded; the message says why. Nothing of it has run."""


class Recorder(Protocol):
    def listening(self) -> AbstractContextManager[list[str]]:
        """For running work as usual; the list that it gives then names what no recording could hold."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the work without running it; what comes back runs it."""


# A capture that failed: before torch 2.12 its allocators may go on asking the graph, which therefore must not go.
_BROKEN: list[torch.cuda.CUDAGraph] = []


class CudaRecorder:
    """Records on a stream of its own; what it records shares one pool of memory, since no two replays overlap.

    Costs of recording: the host's time for the work, a garbage collection, and the allocator's cached blocks, which
    torch gives back first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    @contextmanager
    def listening(self) -> Iterator[list[str]]:
        """Notes what makes the host wait for the device, copies between the two, and random numbers of the host's:
        a recording would break at the first, and repeat the others as they were."""
        heard: list[str] = []
        before, drawn = torch.cuda.get_sync_debug_mode(), _host_streams()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with _Crossings(heard):
                    yield heard
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for warning in caught:
            text = str(warning.message)
            if "called a synchronizing CUDA operation" in text:
                heard.append(f"{warning.filename}:{warning.lineno} makes the host wait for the device")
            elif "prototype feature" not in text:  # what the mode says of itself
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        if _host_streams() != drawn:
            heard.append("the step draws random numbers on the host")

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        gc.collect()  # an older step's graph, alive in a cycle, ties its gradients to the stream it ran on
        if not self._graphs:  # a pool whose graphs are all gone cannot be recorded into again
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self._index]
        seed, offset = generator.initial_seed(), generator.get_offset()
        try:
            # The outer stream is put back even where torch.cuda.graph fails to. And only this thread's doings count:
            # others may decode images and pin memory meanwhile.
            with (
                torch.cuda.device(self._index),
                torch.cuda.stream(torch.cuda.current_stream(self._device)),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                work()
        except BaseException as error:
            _BROKEN.append(graph)
            self._recover(graph, seed, offset)
            if not isinstance(error, Exception):
                raise
            raise Uncapturable(_reason(error)) from error
        self._graphs.add(graph)
        return graph.replay

    @property
    def _index(self) -> int:
        return torch.cuda.current_device() if self._device.index is None else self._device.index

    def _recover(self, graph: torch.cuda.CUDAGraph, seed: int, offset: int) -> None:
        """Torch may leave its allocator and generator believing that a failed capture goes on (pytorch#171263)."""
        with suppress(Exception):
            graph.reset()
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(self._index, self._pool)
        with suppress(Exception):
            if not self._graphs:  # before pytorch#190348 nobody else gives back what was taken so far
                torch._C._cuda_releasePool(self._index, self._pool)
        with suppress(Exception):
            fresh = torch.Generator(self._device)
            fresh.manual_seed(seed)
            fresh.set_offset(offset)
            torch.cuda.default_generators[self._index].graphsafe_set_state(fresh.graphsafe_get_state())
        self._graphs.clear()


@contextmanager
def brief_collections() -> Iterator[None]:
    """Inside, garbage collections pass over everything that was there before: for many recordings in a row.

    Each collects first, and of a process with torch in it that is 160 ms of walking for a recording of 15.
    """
    if gc.get_freeze_count():  # someone else's doing, and theirs to undo
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Crossings(TorchDispatchMode):
    """Notes copies between host and device, which read or write host memory that a replay no longer finds."""

    def __init__(self, heard: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heard = heard

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            kinds = {leaf.device.type for leaf in tree_leaves((args, out)) if isinstance(leaf, Tensor)}
            if len(kinds) > 1:
                self.heard.append("the step copies between host and device")
        return out


def _host_streams() -> tuple[Any, ...]:
    state = np.random.get_state(legacy=False)  # noqa: NPY002  # the global generator is what augmentation uses
    return random.getstate(), repr(state), torch.get_rng_state().numpy().tobytes()


def _reason(error: BaseException) -> str:
    """The first line of what went wrong first: what follows speaks of a previous error only."""
    while error.__context__ is not None:
        error = error.__context__
    text = str(error)
    return text.splitlines()[0] if text else type(error).__name__


@functools.cache
def find_recorder(device: torch.device) -> Recorder | None:
    """What can record on this device, one for all; None where nothing can."""
    return CudaRecorder(device) if device.type == "cuda" else None
