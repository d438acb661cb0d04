"""Trace one real step: autograd's own graph as data, with the live nodes beside it for whoever wants to time them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node as AutogradNode
from torch.utils.checkpoint import CheckpointFunction

from elastictrainer.errors import ProfileError
from elastictrainer.graph import Graph, Node, TensorInfo
from elastictrainer.profiling.refusals import explained, refuse_loss

__all__ = ["Live", "LossFn", "Owners", "Trace", "forward", "next_sequence_number", "note_owners", "trace"]

LossFn = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, eq=False)
class Live:
    """The autograd nodes of one forward pass: operations in backward order, and each tensor's accumulation node."""

    loss: Tensor
    operations: tuple[AutogradNode, ...]
    accumulators: tuple[AutogradNode, ...]


@dataclass(frozen=True, eq=False)
class Trace:
    """A step's graph, and how to find its nodes again after another forward pass.

    `walk` holds, for each node met when the graph is walked from the loss, its kind and the index it has in `graph`
    (operations count up from 0, tensors count down from -1, None is left out): a later pass must walk the same way.
    `edges[i]` lists, for operation i, where each of its gradients goes: an operation, a tensor (negative) or nowhere.
    """

    graph: Graph
    walk: tuple[tuple[str, int | None], ...]
    edges: tuple[tuple[int | None, ...], ...]

    def locate(self, loss: Tensor) -> Live:
        """The live nodes of a fresh loss, in the order of the graph."""
        operations: list[AutogradNode | None] = [None] * len(self.graph.nodes)
        accumulators: list[AutogradNode | None] = [None] * len(self.graph.tensors)
        met = list(_walk(loss))
        differs = self._first_difference([node.name() for node in met])
        if differs is not None:
            raise ProfileError(
                "the model does not run the same operations every time: its backward graph changed between two passes "
                f"over one batch, first {self._place(differs)}; a step like that has no fixed price: make its control "
                "flow depend on shapes only"
            )
        for node, (_, index) in zip(met, self.walk):
            if index is not None and index >= 0:
                operations[index] = node
            elif index is not None:
                accumulators[-1 - index] = node
        return Live(
            loss, tuple(n for n in operations if n is not None), tuple(n for n in accumulators if n is not None)
        )

    def _first_difference(self, kinds: list[str]) -> int | None:
        """Where a walk over nodes of these kinds leaves this one."""
        pairs = enumerate(zip_longest((kind for kind, _ in self.walk), kinds))
        return next((place for place, (here, there) in pairs if here != there), None)

    def _place(self, place: int) -> str:
        """Where in the model that is: what is missing belongs to the operation there, what is new runs after it."""
        there = next((i for _, i in self.walk[place:] if i is not None and i >= 0), None)
        module = "" if there is None else self.graph.nodes[there].module
        return f"in {module!r} or right after it" if module else "outside its modules"


def forward(model: nn.Module, loss_fn: LossFn, batch: Any) -> Tensor:
    """The loss of one batch, checked: a scalar that something trainable leads to."""
    loss = loss_fn(model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ProfileError(f"loss_fn(model, batch) must return a scalar tensor; it returned {found}")
    return loss


def trace(model: nn.Module, loss_fn: LossFn, batch: Any, names: Mapping[str, nn.Parameter]) -> Trace:
    """Run one forward and one backward pass and read the graph that autograd built, with `names` as its tensors.

    Every candidate must require a gradient now. Leaves gradients behind: call it inside `untouched`.
    """
    with note_owners(model) as owners, explained(model, batch):
        loss = forward(model, loss_fn, batch)
    refuse_loss(model, loss, lambda: loss_fn(model, batch), batch)
    if loss.grad_fn is None:
        raise ProfileError(
            "the loss does not depend on any trainable parameter: loss_fn must not detach it or run under no_grad"
        )
    by_id = {id(parameter): name for name, parameter in names.items()}
    met = list(_walk(loss))
    _refuse_reentrant(met, owners)
    order = _execution_order(loss, met)

    leaf_name = {node: by_id.get(id(_variable(node))) for node in met if _variable(node) is not None}
    useful: set[AutogradNode] = set()  # operations that lead to a candidate
    for node in reversed(order):
        targets = [target for target, _ in node.next_functions]
        if any(target in useful or leaf_name.get(target) is not None for target in targets if target is not None):
            useful.add(node)
    operations = [node for node in order if node in useful]
    position = {node: i for i, node in enumerate(operations)}

    tensors: dict[str, int] = {}
    nodes: list[Node] = []
    edges: list[tuple[int | None, ...]] = []
    for node in operations:
        inputs: dict[int, None] = {}
        hung: dict[int, None] = {}
        row: list[int | None] = []
        for target, _ in node.next_functions:
            name = leaf_name.get(target) if target is not None else None
            if name is not None:
                k = tensors.setdefault(name, len(tensors))
                hung[k] = None
                row.append(-1 - k)
            elif target in position:
                inputs[position[target]] = None
                row.append(position[target])
            else:
                row.append(None)
        nodes.append(Node(node.name(), owners.of(node), tuple(inputs), tuple(hung)))
        edges.append(tuple(row))

    infos = tuple(_info(name, names[name]) for name in tensors)
    graph = Graph(tuple(nodes), infos, unused=tuple(name for name in names if name not in tensors))
    walk = tuple((node.name(), position.get(node, _leaf_index(leaf_name.get(node), tensors))) for node in met)
    return Trace(graph, walk, tuple(edges))


def _leaf_index(name: str | None, tensors: dict[str, int]) -> int | None:
    return -1 - tensors[name] if name is not None and name in tensors else None


def _info(name: str, parameter: nn.Parameter) -> TensorInfo:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return TensorInfo(name, tuple(parameter.shape), dtype, parameter.numel() * parameter.element_size())


def _variable(node: AutogradNode) -> Tensor | None:
    variable = getattr(node, "variable", None)  # only AccumulateGrad has one
    return variable if isinstance(variable, Tensor) else None


def _walk(loss: Tensor) -> Iterator[AutogradNode]:
    """Every node below the loss once, in an order fixed by the graph's structure."""
    root = loss.grad_fn
    seen = {root}
    stack = [root] if root is not None else []
    while stack:
        node = stack.pop()
        yield node
        for target, _ in node.next_functions:
            if target is not None and target not in seen:
                seen.add(target)
                stack.append(target)


def _execution_order(loss: Tensor, met: list[AutogradNode]) -> list[AutogradNode]:
    """The operations in the order in which the engine really runs them (`named_parameters()` order is not that)."""
    ran: dict[AutogradNode, None] = {}
    handles = []
    for node in met:
        if _variable(node) is None:

            def note(_: Any, node: AutogradNode = node) -> None:
                ran[node] = None

            handles.append(node.register_prehook(note))
    try:
        loss.backward(retain_graph=True)  # the graph is walked again for timing
    finally:
        for handle in handles:
            handle.remove()
    return list(ran)


def next_sequence_number() -> int:
    """The number that autograd will give the next node it records on this thread."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


class Owners:
    """Which module's forward made a node, by the sequence numbers that autograd hands out as it records."""

    def __init__(self, stamp: Callable[[], Any]) -> None:
        self.stamp = stamp
        self.starts: list[int] = [next_sequence_number()]
        self.names: list[str] = [""]
        self.stamps: list[Any] = [stamp()]
        self.stack: list[str] = [""]

    def enter(self, name: str) -> None:
        self.stack.append(name)
        self._mark()

    def leave(self) -> None:
        self.stack.pop()
        self._mark()

    def _mark(self) -> None:
        self.starts.append(next_sequence_number())
        self.names.append(self.stack[-1])
        self.stamps.append(self.stamp())

    def of(self, node: AutogradNode) -> str:
        number = getattr(node, "_sequence_nr", None)
        return self.at(number()) if callable(number) else ""

    def at(self, number: int) -> str:
        """The innermost module that was running when autograd handed out this sequence number."""
        return self.names[max(bisect_right(self.starts, number) - 1, 0)]


@contextmanager
def note_owners(model: nn.Module, stamp: Callable[[], Any] = lambda: None) -> Iterator[Owners]:
    """Inside, a forward pass of the model notes which module makes which node, and stamps every module's door."""
    owners = Owners(stamp)
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: owners.enter(name)))
        handles.append(module.register_forward_hook(lambda *_: owners.leave(), always_call=True))
    try:
        yield owners
    finally:
        for handle in handles:
            handle.remove()


def _refuse_reentrant(met: list[AutogradNode], owners: Owners) -> None:
    for node in met:
        if getattr(node, "_forward_cls", None) is CheckpointFunction:
            where = owners.of(node) or "the model"
            raise ProfileError(
                f"{where} uses re-entrant checkpointing, which hides its tensors from autograd's graph and breaks when "
                f"the first layers rest; call torch.utils.checkpoint.checkpoint(..., use_reentrant=False) there"
            )
