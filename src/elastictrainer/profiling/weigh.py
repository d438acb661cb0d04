"""Weigh a step: which storages autograd keeps for backward, for whose sake, and what lives only while a node runs."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from elastictrainer.profiling.fingerprint import tensors_in
from elastictrainer.profiling.profile import Memory, Storage
from elastictrainer.profiling.timing import deepest
from elastictrainer.profiling.trace import LossFn, Owners, Trace, forward, next_sequence_number, note_owners

__all__ = ["weigh"]

Apply = Callable[[Sequence[int]], None]
Kept = dict[int, list[tuple[int, int]]]  # node -> (storage, bytes) in the order in which it saved them


def weigh(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    trace: Trace,
    *,
    geometry: Sequence[Any],
    state_bytes: Sequence[int],
    train: Apply,
) -> Memory:
    """Run forward under three plans (`train(indices)` applies one) and see what each node keeps under each.

    Everything trained shows all that can be kept and what is shared. With only the deepest tensors trained every node
    still passes, so what is missing then was kept for a tensor's own gradient; training all but each node's largest
    tensor tells whether the small ones (biases) need it too. What checkpointing recomputes, and what a custom function
    hides from autograd, is not seen. Costs four forward passes.
    """
    graph = trace.graph
    count = len(graph.tensors)
    owned = _owned_tensors(trace)
    largest = {max(ks, key=lambda k: graph.tensors[k].nbytes) for ks in owned.values() if ks}
    sinks = set(deepest(trace))
    fixed = {_storage(t) for t in (*model.parameters(), *model.buffers(), *tensors_in(batch))}

    train(range(count))
    everything = _kept(model, loss_fn, batch, trace, fixed)
    slim = []
    for plan in (sinks, sinks | set(range(count)) - largest):
        train(sorted(plan))
        slim.append(_kept_sizes(model, loss_fn, batch, fixed))
    passing, small = slim
    train(range(count))

    holders: dict[int, tuple[int, set[int], set[int]]] = {}
    for node, saved in everything.items():
        module = graph.nodes[node].module
        left_passing, left_small = passing.setdefault(module, Counter()), small.setdefault(module, Counter())
        for storage, nbytes in saved:
            _, nodes, tensors = holders.setdefault(storage, (nbytes, set(), set()))
            needed_by_small = left_small[nbytes] > 0
            left_small[nbytes] -= needed_by_small
            if left_passing[nbytes] > 0 or not owned[node]:
                left_passing[nbytes] -= 1
                nodes.add(node)
            else:
                tensors.update(owned[node] if needed_by_small else set(owned[node]) & largest or owned[node])
    incoming = np.asarray([_grad_bytes(g) for g in geometry], dtype=np.int64)
    workspace = incoming + np.asarray([sum(incoming[m] for m in n.inputs) for n in graph.nodes], dtype=np.int64)
    return Memory(
        base_bytes=_distinct_bytes([*model.parameters(), *model.buffers(), *tensors_in(batch)]),
        storages=tuple(Storage(n, tuple(sorted(nodes)), tuple(sorted(ks))) for n, nodes, ks in holders.values()),
        workspace_bytes=workspace,
        state_bytes=np.asarray(state_bytes, dtype=np.int64),
    )


def _owned_tensors(trace: Trace) -> dict[int, tuple[int, ...]]:
    """For each node the tensors whose own gradient it makes: hung on it, or behind its module's operations on a weight.

    Those (a transpose, a cast, a parametrization) lead to that tensor alone and run inside the module that uses it;
    the very first layer leads to one tensor too, but it is a module of its own.
    """
    graph = trace.graph
    rows = np.unpackbits(graph.leads_to, axis=1, count=len(graph.nodes)).view(np.bool_)
    lone = {int(n): int(np.flatnonzero(rows[:, n])[0]) for n in np.flatnonzero(rows.sum(axis=0) == 1)}

    def behind(node: int) -> list[int]:
        module = graph.nodes[node].module
        return [lone[m] for m in graph.nodes[node].inputs if m in lone and graph.nodes[m].module.startswith(module)]

    return {i: tuple(dict.fromkeys([*node.tensors, *behind(i)])) for i, node in enumerate(graph.nodes)}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _distinct_bytes(tensors: Sequence[Tensor]) -> int:
    return sum({_storage(t): t.untyped_storage().nbytes() for t in tensors if t.layout is torch.strided}.values())


def _grad_bytes(geometry: Any) -> int:
    """Of the gradients that an operation receives; one that is stretched to its shape takes the room of what it was."""
    return sum(
        math.prod(size for size, step in zip(shape, stride) if step) * dtype.itemsize
        for shape, stride, dtype, _ in (g for g in geometry or () if g is not None)
    )


def _record(
    model: nn.Module, loss_fn: LossFn, batch: Any, fixed: set[int]
) -> tuple[Tensor, Owners, list[tuple[int, int, int]]]:
    """The loss, still holding what it saved, and (sequence number, storage, bytes) of each tensor saved."""
    rows: list[tuple[int, int, int]] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided and _storage(tensor) not in fixed:
            # autograd makes the node before it saves for it: the last number handed out is the node's own
            rows.append((next_sequence_number() - 1, _storage(tensor), tensor.untyped_storage().nbytes()))
        return tensor.detach()  # a node that keeps its own output through a hook would keep itself alive for ever

    with note_owners(model) as owners, saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward(model, loss_fn, batch)
    return loss, owners, rows


def _kept(model: nn.Module, loss_fn: LossFn, batch: Any, trace: Trace, fixed: set[int]) -> Kept:
    loss, owners, rows = _record(model, loss_fn, batch, fixed)
    node_of = {node._sequence_nr(): i for i, node in enumerate(trace.locate(loss).operations)}
    numbers = sorted(node_of)
    kept: Kept = {}
    for number, storage, nbytes in rows:
        # Some operations that work in place hand out a number more before they save: theirs is the last one known.
        last = bisect_right(numbers, number) - 1
        if last >= 0 and (numbers[last] == number or owners.at(numbers[last]) == owners.at(number)):
            kept.setdefault(node_of[numbers[last]], []).append((storage, nbytes))
    return kept


def _kept_sizes(model: nn.Module, loss_fn: LossFn, batch: Any, fixed: set[int]) -> dict[str, Counter[int]]:
    """How often each size was kept by each module (not node: torch may run other operations on resting tensors)."""
    _loss, owners, rows = _record(model, loss_fn, batch, fixed)
    sizes: dict[str, Counter[int]] = {}
    for number, _, nbytes in rows:
        sizes.setdefault(owners.at(number), Counter())[nbytes] += 1
    return sizes
