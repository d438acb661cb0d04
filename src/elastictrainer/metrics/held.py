"""Bytes that a forward pass leaves allocated: what autograd holds for backward, whoever saved it and however."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["held_bytes"]


def held_bytes(forward: Callable[[], Tensor], model: nn.Module) -> int:
    """Run `forward` and count what stays allocated while its result lives, the model's own tensors apart.

    Counts blocks of memory by whether they are still there, each once, on any device; so it sees through saved-tensor
    hooks, views and shared storage. Costs a slow forward pass (Python runs at every operation).

        >>> import torch
        >>> model = nn.Linear(2, 3)
        >>> x = torch.ones(5, 2)
        >>> held_bytes(lambda: model(x).square().sum(), model)  # 5 x 3 outputs for the square, and the loss
        64
    """
    births = _Births()
    with births:
        result = forward()
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    held = [nbytes for block, nbytes in births.blocks.values() if block.cdata not in own and not _gone(block)]
    del result  # it had to live until here
    return sum(held)


def _gone(block: StorageWeakRef) -> bool:
    return bool(block.expired())


class _Births(TorchDispatchMode):
    """Remembers, weakly, each block of memory that an operation returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                block = StorageWeakRef(storage)
                self.blocks[block.cdata] = (block, storage.nbytes())
        return out
