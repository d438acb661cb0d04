"""Record what a step launches on a GPU once, and launch all of it at once ever after (CUDA graphs).

At batch 4 a large GPU waits for its host: a step of ResNet50 is some 1,500 launches, each dearer to ask for than to do.
What a graph can hold is work that is the same at every replay and asks the device for nothing: no `.item()`, no copy to
the host, no shape that hangs on a value. Tensors it reads and writes must stay where they were in memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from elastictrainer.runtime.optimizers import SGDW

__all__ = ["CudaRecorder", "Recorder", "Uncapturable", "as_captured", "find_recorder", "steps_in_a_graph"]


class Uncapturable(Exception):
    """This work cannot be recorded; the message says why. Nothing of it has run."""


class Recorder(Protocol):
    def listening(self) -> Any:
        """A context for running work as usual; it gives a list that then names what no graph could hold."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the work without running it; what comes back runs it."""


class CudaRecorder:
    """Records on a stream of its own; all that it records shares one pool of memory, since no two replays overlap.

    Costs of recording: the host's time for the work, and the allocator's cached blocks, which torch gives back first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def listening(self) -> Iterator[list[str]]:
        heard: list[str] = []
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield heard
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for warning in caught:
            text = str(warning.message)
            if "called a synchronizing CUDA operation" in text:
                heard.append(f"{warning.filename}:{warning.lineno} makes the host wait for the device")
            elif "prototype feature" not in text:  # what the mode says of itself
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self._device.index or 0]
        seed, offset = generator.initial_seed(), generator.get_offset()
        try:
            # Only this thread's doings count: others may decode images and pin memory meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                work()
        except Exception as error:
            self._recover(graph, seed, offset)
            raise Uncapturable(str(error).splitlines()[0] if str(error) else type(error).__name__) from error
        return graph.replay

    def _recover(self, graph: torch.cuda.CUDAGraph, seed: int, offset: int) -> None:
        """Torch may leave its allocator and generator believing that a failed capture goes on (pytorch#171263)."""
        with suppress(Exception):
            graph.reset()
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(self._device.index or 0, self._pool)
        with suppress(Exception):
            fresh = torch.Generator(self._device)
            fresh.manual_seed(seed)
            fresh.set_offset(offset)
            torch.cuda.default_generators[self._device.index or 0].graphsafe_set_state(fresh.graphsafe_get_state())
        self._pool = torch.cuda.graph_pool_handle()


def find_recorder(device: torch.device) -> Recorder | None:
    """What can record on this device; None where nothing can."""
    return CudaRecorder(device) if device.type == "cuda" else None


# Exactly these: what a subclass adds to a step may be the host's work, which no graph repeats.
_STEPS = (SGD, SGDW, Adam, AdamW)


def steps_in_a_graph(optimizer: Optimizer) -> bool:
    """Whether this optimizer's own step can be recorded, with a learning rate that goes on changing.

    Someone else's hooks around the step may be the host's work, too.
    """
    ours = ("FusedStart",)
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    foreign = [h for h in hooks if type(getattr(h, "__self__", None)).__name__ not in ours]
    dense = all(
        p.grad is None or (p.grad.layout is torch.strided and p.grad.is_floating_point())
        for group in optimizer.param_groups
        for p in group["params"]
    )
    plain = not any(group.get("differentiable") for group in optimizer.param_groups)
    return type(optimizer) in _STEPS and not foreign and dense and plain


@contextmanager
def as_captured(optimizer: Optimizer, rates: Sequence[Tensor]) -> Iterator[None]:
    """Inside, a step of this optimizer reads each group's learning rate from a tensor and asks the device nothing.

    SGD does so in its fused kernel, Adam as `capturable`, which counts steps on the device. The groups are afterwards
    as they were; Adam's counts stay on the device, where its other ways of stepping find them, too.
    """
    before = [dict(group) for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate
        if isinstance(optimizer, SGD):
            group["fused"], group["foreach"] = True, False
        else:
            group["capturable"] = True
            for parameter in group["params"]:
                count = optimizer.state.get(parameter, {}).get("step")
                if isinstance(count, Tensor) and count.device != parameter.device:
                    optimizer.state[parameter]["step"] = count.to(parameter.device, torch.float32)
    try:
        yield
    finally:
        for group, was in zip(optimizer.param_groups, before):
            group.clear()
            group.update(was)
