"""The choice as a set-up knapsack: items with a value and a price, and sets of items that share a set-up price."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Problem", "as_mask", "as_set", "bits", "fold"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Problem:
    """Choose items of the most value; a group's price is paid once if any of its items is chosen.

    Every price is a row with one column a constraint (seconds on each clock, bytes at a moment of the step), in shares
    of that constraint's capacity: a choice is feasible if its prices sum to at most 1 in every column.

    `groups` are bit sets over the items (bit k: item k). A group stands for the operations that are reached together,
    its set for the tensors on or below them.
    """

    value: Floats
    price: Floats
    groups: tuple[int, ...]
    group_price: Floats

    @property
    def items(self) -> int:
        return len(self.value)

    @property
    def constraints(self) -> int:
        return int(self.price.shape[1])

    def only(self, kept: NDArray[np.bool_]) -> Problem:
        """The same problem without the other items."""
        sets = [as_set(as_mask(group, self.items)[kept]) for group in self.groups]
        return fold(self.value[kept], self.price[kept], sets, self.group_price)

    def opened(self, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """The groups that hold a chosen item."""
        mask = as_set(chosen)
        return np.fromiter((group & mask != 0 for group in self.groups), dtype=np.bool_, count=len(self.groups))

    def cost(self, chosen: NDArray[np.bool_]) -> Floats:
        """What a choice costs, as shares of the capacities."""
        own = self.price[chosen].sum(axis=0)
        return np.asarray(own + self.group_price[self.opened(chosen)].sum(axis=0), dtype=np.float64)

    def on_sale(self, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """The items outside a choice whose groups it has all paid for."""
        blocked = 0
        for group, is_open in zip(self.groups, self.opened(chosen).tolist()):
            if not is_open:
                blocked |= group
        return ~(chosen | as_mask(blocked, self.items))

    def affordable(self, chosen: NDArray[np.bool_], left: Floats) -> list[tuple[int, Floats]]:
        """Items outside a choice that `left` can still buy, each with what it adds, its closed groups included."""
        closed = np.flatnonzero(~self.opened(chosen))
        dear = (self.group_price[closed] > left).any(axis=1)
        blocked = 0
        for g in closed[dear].tolist():
            blocked |= self.groups[g]
        cheap = ~chosen & (self.price <= left).all(axis=1) & ~as_mask(blocked, self.items)
        extra = self.price.copy()
        for g in closed[~dear].tolist():
            extra[as_mask(self.groups[g], self.items)] += self.group_price[g]
        return [(k, extra[k]) for k in np.flatnonzero(cheap & (extra <= left).all(axis=1)).tolist()]


def fold(value: Floats, price: Floats, sets: Iterable[int], set_price: Floats) -> Problem:
    """Merge equal sets, move a set of one item onto that item's own price, drop the free and the empty ones."""
    price = price.copy()
    row_of: dict[int, int] = {}
    rows = [row_of.setdefault(members, len(row_of)) for members in sets]
    total = np.zeros((len(row_of), price.shape[1]))
    np.add.at(total, rows, set_price)
    has_price: list[bool] = np.asarray(total.any(axis=1)).tolist()
    groups: list[int] = []
    kept: list[int] = []
    for members, row in row_of.items():
        if has_price[row] and members:
            if members & (members - 1) == 0:
                price[members.bit_length() - 1] += total[row]
            else:
                groups.append(members)
                kept.append(row)
    return Problem(value=value, price=price, groups=tuple(groups), group_price=total[kept])


def bits(members: int) -> Iterator[int]:
    """The positions of a set's bits, lowest first."""
    while members:
        low = members & -members
        yield low.bit_length() - 1
        members ^= low


def as_mask(members: int, size: int) -> NDArray[np.bool_]:
    """A bit set as an array of booleans."""
    packed = np.frombuffer(members.to_bytes((size + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(packed, count=size, bitorder="little").view(np.bool_)


def as_set(mask: NDArray[np.bool_]) -> int:
    """An array of booleans as a bit set."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")
