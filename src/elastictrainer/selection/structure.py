"""What may be reached together: the groups of a problem arranged as trees of steps, each extending the one before it.

Two groups *cross* if they overlap and neither holds the other. Groups that cross nothing nest like brackets: on a chain
of layers all of them do. Crossing groups are collected into clusters (the two paths of a residual block), and the
clusters nest like brackets again. That recovers the single-entry single-exit segments of the network, and with them
dead-end side branches (a weight norm's `g` and `v`, a conditioning network, a second tower), without the graph.

- A single group is one step: pay it, and its own items are on sale.
- Inside a cluster every union of what its items need is one step, which extends a smaller union by the items that it
  newly puts on sale. These are the closed sets.
- What lies deeper hangs below the step that reaches it. What several steps reach, or lies beside the main path, is a
  `Branch` of its own, entered or not from each of those steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from elastictrainer.selection.problem import Floats, Problem, bits

__all__ = ["Branch", "Structure", "arrange"]

Indices = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Branch:
    """A tree of steps, in preorder; a choice ends at one step, having paid every step above it, or enters none.

    Step s extends `parent[s]` (-1: nothing), costs `price[s]`, and puts `items[start[s]:start[s + 1]]` on sale, and the
    branches `sides[s]`, each of which may be entered. Its subtree is `s .. end[s] - 1`, the largest child last.
    """

    parent: Indices
    end: Indices
    price: Floats
    items: Indices
    start: Indices
    sides: dict[int, tuple[Branch, ...]]


@dataclass(frozen=True, eq=False)
class Structure:
    """`branches` in an order in which every branch follows the ones it leads to; the last one is the whole problem.

    `exact` is False if a cluster had more closed sets than the limit: then only the prefixes of its backward order are
    there (or, if it was relaxed, groups were made free until it had few enough).
    """

    branches: tuple[Branch, ...]
    exact: bool

    @property
    def root(self) -> Branch:
        return self.branches[-1]


def arrange(problem: Problem, *, limit: int = 4096, relax: bool = False) -> Structure:
    """Arrange the groups of a problem; `limit` is the most closed sets of one cluster that are listed.

    With `relax`, a cluster over the limit keeps its most expensive groups that do not cross each other and the others
    become free: every choice then costs at most what it really does, so that the best one bounds the problem.
    Costs a few set operations a group: milliseconds for hundreds of groups, below a second for 10,000.
    """
    groups = list(range(len(problem.groups)))
    while True:
        builder = _Builder(problem, _clusters(problem, groups), limit)
        structure = builder.build()
        if structure.exact or not relax:
            return structure
        # Every cluster has two groups that cross, so that each round drops at least one and the loop ends.
        dropped = {g for members in builder.capped for g in _crossing(problem, members)}
        groups = [g for g in groups if g not in dropped]


@dataclass(eq=False)
class _Cluster:
    """Groups linked by crossing, with the clusters nested inside them. The outermost one has no groups."""

    union: int
    groups: list[int]
    parent: _Cluster | None = None
    children: list[_Cluster] = field(default_factory=list)


def _clusters(problem: Problem, groups: Iterable[int]) -> _Cluster:
    """Insert the groups largest first, so that a new one never holds an earlier one: it nests in it or crosses it."""
    everything = (1 << problem.items) - 1
    outer = _Cluster(union=everything, groups=[])
    last = outer
    for g in sorted(groups, key=lambda g: (-problem.groups[g].bit_count(), g)):
        members = problem.groups[g]
        while members & ~last.union:
            assert last.parent is not None, "the outermost cluster holds every item"
            last = last.parent
        last = _insert(problem, last, g, members)
    return outer


def _insert(problem: Problem, cluster: _Cluster, g: int, members: int) -> _Cluster:
    """Put a group into the cluster that holds it, going down while it fits into one child; returns its cluster."""
    while True:
        joins = len(cluster.groups) > 1 and any(_cross(members, problem.groups[h]) for h in cluster.groups)
        met = [child for child in cluster.children if child.union & members]
        if not joins and len(met) == 1 and not members & ~met[0].union:
            cluster = met[0]
            continue
        # The group does not fit into any child that it meets, and is no larger than any group in there: it crosses one.
        if joins:
            target = cluster
            target.groups.append(g)
        else:
            target = _Cluster(union=members, groups=[g], parent=cluster)
        for child in met:
            cluster.children.remove(child)
            _absorb(target, child, members)
        if not joins:
            cluster.children.append(target)
        return target


def _absorb(target: _Cluster, child: _Cluster, members: int) -> None:
    """Merge a crossed child into the target, and whatever below it the new group crosses as well."""
    target.groups += child.groups
    target.union |= child.union
    for grandchild in child.children:
        if grandchild.union & members:
            _absorb(target, grandchild, members)
        else:
            grandchild.parent = target
            target.children.append(grandchild)


def _cross(a: int, b: int) -> bool:
    return bool(a & b and a & ~b and b & ~a)


def _crossing(problem: Problem, groups: list[int]) -> list[int]:
    """All but a family of these groups that cross nothing in it, the most expensive kept first."""
    kept: list[int] = []
    dropped: list[int] = []
    for g in sorted(groups, key=lambda g: (-float(problem.group_price[g].max()), g)):
        crosses = any(_cross(problem.groups[g], problem.groups[h]) for h in kept)
        (dropped if crosses else kept).append(g)
    return dropped


@dataclass(eq=False)
class _Steps:
    """A branch while it is being built: lists by step, a parent always before its children."""

    parent: list[int] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)
    items: list[list[int]] = field(default_factory=list)
    sides: list[list[Branch]] = field(default_factory=list)

    def add(self, parent: int, groups: list[int], items: list[int]) -> int:
        self.parent.append(parent)
        self.groups.append(groups)
        self.items.append(items)
        self.sides.append([])
        return len(self.parent) - 1


class _Builder:
    def __init__(self, problem: Problem, outer: _Cluster, limit: int) -> None:
        self.problem = problem
        self.outer = outer
        self.limit = limit
        self.branches: list[Branch] = []
        self.capped: list[list[int]] = []

    def build(self) -> Structure:
        self._branch(self.outer)
        return Structure(branches=tuple(self.branches), exact=not self.capped)

    def _branch(self, cluster: _Cluster) -> Branch:
        """The branch that a cluster begins. The main path is followed in a loop: it may be thousands of steps long."""
        steps = _Steps()
        pending = [(cluster, -1)]
        while pending:
            here, parent = pending.pop()
            inside = 0
            for child in here.children:
                inside |= child.union
            own = list(bits(here.union & ~inside))
            if len(here.groups) > 1:
                end, deeper = self._closed_sets(steps, parent, here, own)
            else:
                end, deeper = steps.add(parent, list(here.groups), own), list(here.children)
            if deeper:
                main = max(deeper, key=lambda c: c.union.bit_count())
                steps.sides[end] += [self._branch(c) for c in deeper if c is not main]
                pending.append((main, end))
        branch = _freeze(self.problem, steps)
        self.branches.append(branch)
        return branch

    def _closed_sets(self, steps: _Steps, parent: int, cluster: _Cluster, own: list[int]) -> tuple[int, list[_Cluster]]:
        """One step for every union of what the cluster's items and children need; returns the step that holds all of
        them, and the children that only it reaches."""
        sets = [self.problem.groups[g] for g in cluster.groups]
        items: dict[int, list[int]] = {}
        for k in own:
            items.setdefault(_need(sets, 1 << k), []).append(k)
        children: dict[int, list[_Cluster]] = {}
        for child in cluster.children:
            children.setdefault(_need(sets, child.union & -child.union), []).append(child)
        needs = sorted(items.keys() | children.keys())
        whole = (1 << len(sets)) - 1
        deeper = children.pop(whole, [])
        branches = {need: [self._branch(child) for child in nested] for need, nested in children.items()}

        tree = _unions(needs, self.limit)
        if tree is None:
            self.capped.append(list(cluster.groups))
            first = {
                need: min(
                    [*items.get(need, ()), *(_lowest(c.union) for c in children.get(need, ()))],
                    default=self.problem.items,
                )
                for need in needs
            }
            tree = _prefixes(sorted(needs, key=lambda need: (first[need], need)))
        step_of = {0: parent}
        for before, after in tree:
            fresh = [need for need in needs if not need & ~after and need & ~before]
            opened = [cluster.groups[i] for i in bits(after & ~before)]
            step = steps.add(step_of[before], opened, [k for need in fresh for k in items.get(need, ())])
            steps.sides[step] += [branch for need in fresh for branch in branches.get(need, ())]
            step_of[after] = step
        return step_of[whole], deeper


def _need(sets: list[int], item: int) -> int:
    """Which of these groups (as a bit set of their positions) hold the item."""
    need = 0
    for i, members in enumerate(sets):
        if members & item:
            need |= 1 << i
    return need


def _lowest(members: int) -> int:
    return (members & -members).bit_length() - 1


def _unions(needs: list[int], limit: int) -> list[tuple[int, int]] | None:
    """All unions of these sets, each with a smaller one that it extends by as little as possible; None if too many."""
    tree: list[tuple[int, int]] = []
    seen = {0}
    pending = [0]
    while pending:
        before = pending.pop()
        grown = {before | need for need in needs if need & ~before}
        for after in sorted(grown):
            if after in seen or any(other != after and not other & ~after for other in grown):
                continue
            if len(tree) == limit:
                return None
            seen.add(after)
            tree.append((before, after))
            pending.append(after)
    return tree


def _prefixes(needs: list[int]) -> list[tuple[int, int]]:
    """The unions of the first, the first two, ... of these sets."""
    tree: list[tuple[int, int]] = []
    before = 0
    for need in needs:
        if need & ~before:
            tree.append((before, before | need))
            before |= need
    return tree


def _freeze(problem: Problem, steps: _Steps) -> Branch:
    """Put the steps into preorder, the largest subtree last (it is searched in place, the others on copies)."""
    count = len(steps.parent)
    size = [1] * count
    children: list[list[int]] = [[] for _ in range(count)]
    for s in range(count - 1, 0, -1):
        if steps.parent[s] >= 0:
            size[steps.parent[s]] += size[s]
            children[steps.parent[s]].append(s)
    roots = [s for s in range(count) if steps.parent[s] < 0]
    order: list[int] = []
    pending = sorted(roots, key=lambda s: -size[s])
    while pending:
        s = pending.pop()
        order.append(s)
        if children[s]:
            pending += sorted(children[s], key=lambda c: -size[c])
    place = [0] * count
    for position, s in enumerate(order):
        place[s] = position
    price = np.zeros((count, problem.constraints))
    paid = [(position, g) for position, s in enumerate(order) for g in steps.groups[s]]
    if paid:
        np.add.at(price, [position for position, _ in paid], problem.group_price[[g for _, g in paid]])
    lengths = [len(steps.items[s]) for s in order]
    return Branch(
        parent=np.asarray([place[steps.parent[s]] if steps.parent[s] >= 0 else -1 for s in order], dtype=np.intp),
        end=np.asarray([position + size[s] for position, s in enumerate(order)], dtype=np.intp),
        price=price,
        items=np.asarray([k for s in order for k in steps.items[s]], dtype=np.intp),
        start=np.concatenate(([0], np.cumsum(np.asarray(lengths, dtype=np.intp)))).astype(np.intp),
        sides={position: tuple(steps.sides[s]) for position, s in enumerate(order) if steps.sides[s]},
    )
