"""What the allocator says that a step holds: forward's own need, each operation's workspace, libraries' blocks.

`weigh` sees what autograd keeps. Not seen are the buffers that kernels ask for while they run (cuDNN's can be larger
than the activations) and what the forward pass needs for a moment where nothing is kept. Where the device has an
allocator that can be asked, it is; on the CPU, which has none, blocks of memory are counted as they come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elastictrainer.profiling.fingerprint import tensors_in
from elastictrainer.profiling.profile import Memory, Profile, Residual
from elastictrainer.profiling.steps import Stepper
from elastictrainer.profiling.trace import LossFn, Trace, forward

__all__ = ["Allocator", "Counted", "Meter", "counted_forward_bytes", "forward_bytes", "observe", "observed_workspace"]

_LIBRARIES = 64 << 20  # cuBLAS keeps 32 MiB for each thread that launches on a Hopper GPU: forward's and backward's


class Meter(Protocol):
    """Bytes in tensors: how many now, and how many at most since `restart()`."""

    def held(self) -> int: ...
    def restart(self) -> None: ...
    def peak(self) -> int: ...


class Allocator:
    """The current CUDA device's own count. It is the host's: no need to wait for the device."""

    def held(self) -> int:
        return torch.cuda.memory_allocated()

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()


class Counted(TorchDispatchMode):
    """Inside, blocks of memory that operations make, each while it lives. Blocks of `known` tensors are not counted.

    Costs Python at every operation; what a kernel asks for and gives back within one operation is not seen.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {t.untyped_storage()._cdata for t in known if t.layout is torch.strided}
        self._blocks: dict[int, tuple[StorageWeakRef, int]] = {}
        self._peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if isinstance(made, Tensor) and made.layout is torch.strided:
                storage = made.untyped_storage()
                if storage._cdata not in self._known:
                    self._blocks.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self._peak = max(self._peak, self.held())
        return out

    def held(self) -> int:
        for gone in [key for key, (block, _) in self._blocks.items() if block.expired()]:
            del self._blocks[gone]
        return sum(nbytes for _, nbytes in self._blocks.values())

    def restart(self) -> None:
        self._peak = self.held()

    def peak(self) -> int:
        return self._peak


def forward_bytes(model: nn.Module, loss_fn: LossFn, batch: Any, meter: Meter) -> int:
    """What a forward pass holds at most beyond what was there, when nothing is kept for backward. Costs that pass."""
    with torch.no_grad():
        meter.restart()
        before = meter.held()
        forward(model, loss_fn, batch)
        return max(meter.peak() - before, 0)


def observed_workspace(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    trace: Trace,
    draft: Profile,
    parameters: Sequence[nn.Parameter],
    meter: Meter,
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """`Memory.workspace_bytes` by what the meter saw while each operation ran, everything trained.

    Whatever the model of what is kept misses at an operation is its workspace too: the sum is right for a full step.
    Costs a step.
    """
    memory, graph = draft.memory, trace.graph
    before = meter.held()
    live = trace.locate(forward(model, loss_fn, batch))
    peaks = np.zeros(len(graph.nodes), dtype=np.int64)
    handles = []
    for i, node in enumerate(live.operations):

        def end(_: Any, __: Any, i: int = i) -> None:
            peaks[i] = meter.peak()

        handles += [node.register_prehook(lambda _: meter.restart()), node.register_hook(end)]
    try:
        live.loss.backward(inputs=list(parameters))
    finally:
        for handle in handles:
            handle.remove()
        for parameter in parameters:
            parameter.grad = None
    always = memory.base_bytes + int(memory.state_bytes.sum())
    kept = draft.held_bytes(draft.names)[:-1] - always - memory.workspace_bytes
    return np.where(peaks > 0, np.maximum(peaks - before - kept, 0), memory.workspace_bytes)


def counted_forward_bytes(model: nn.Module, loss_fn: LossFn, batch: Any) -> int:
    """`forward_bytes` where no allocator can be asked; 0 for a model that does not run while operations are seen."""
    try:
        with Counted([*model.parameters(), *model.buffers(), *tensors_in(batch)]) as meter:
            return forward_bytes(model, loss_fn, batch, meter)
    except (RuntimeError, NotImplementedError, TypeError):  # an operation of its own that knows no dispatch modes
        return 0


def observe(
    stepper: Stepper,
    trace: Trace,
    memory: Memory,
    plans: Sequence[tuple[int, ...]],
    train: Callable[[Sequence[int]], None],
    meter: Meter,
    *,
    recorded: bool = False,
) -> Memory:
    """The same by what the meter sees: in the forward pass, at each operation of a full step, at rest, in whole steps.

    The base is lifted by what whole steps of `plans` take beyond the rest of it, if anything is left. Leaves everything
    trained. Costs a step, and two for each plan. `recorded`: steps were, too, on a stream that has blocks of its own.
    """
    model, loss_fn, batch = stepper.model, stepper.loss_fn, stepper.batch

    def profile(memory: Memory) -> Profile:
        return Profile(trace.graph, (), memory, Residual(0.0, 0.0, 0))

    memory = replace(memory, forward_bytes=forward_bytes(model, loss_fn, batch, meter))
    train(range(len(trace.graph.tensors)))
    workspace = observed_workspace(model, loss_fn, batch, trace, profile(memory), stepper.parameters, meter)
    memory = replace(memory, workspace_bytes=workspace)
    draft = profile(memory)
    missing = []
    for plan in plans:
        train(plan)
        stepper.step()
        before = meter.held()
        meter.restart()
        stepper.step()
        always = memory.base_bytes + int(memory.state_bytes[list(plan)].sum())
        predicted = draft.peak_bytes([draft.names[k] for k in plan]) - always
        missing.append(meter.peak() - before - predicted)
    train(range(len(trace.graph.tensors)))
    beyond = max(0, int(np.median(missing)))
    libraries = min(_rest_bytes(stepper, meter.held()), 2 * _LIBRARIES if recorded else _LIBRARIES)
    return replace(memory, base_bytes=memory.base_bytes + beyond + libraries)


def _rest_bytes(stepper: Stepper, held: int) -> int:
    """What the allocator holds at rest beyond what is known here."""
    model, optimizer = stepper.model, stepper.optimizer
    states = [] if optimizer is None else [v for state in optimizer.state.values() for v in state.values()]
    known = [*model.parameters(), *model.buffers(), *tensors_in(stepper.batch)]
    known += [*(copied for _, copied in stepper.pairs), *(v for v in states if isinstance(v, Tensor))]
    blocks = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in known if t.layout is torch.strided}
    copies = sum(b.untyped_storage().nbytes() for b in model.buffers() if b.layout is torch.strided)  # by `untouched`
    return max(held - sum(blocks.values()) - copies, 0)
