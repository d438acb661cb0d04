"""Several processes that train one model must hold the same plan: what is measured on one rank is what all use."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

__all__ = ["from_first_rank", "ranks"]

Plain = TypeVar("Plain")


def ranks() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def from_first_rank(value: Plain) -> Plain:
    """The first rank's value, on every rank; plain data only. With one process, the value itself.

    Selection is pure, so ranks that share prices and scores come to the same plan without another exchange.
    """
    if ranks() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
