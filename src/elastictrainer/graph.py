"""The backward graph as plain data: operations, the tensors that hang on them, what training some reaches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastictrainer.errors import ProfileError

__all__ = ["Graph", "Node", "TensorInfo", "block_of"]


def block_of(name: str) -> str:
    """The block that a module or tensor belongs to, for people: up to its first run of numbers, else its top level.

    >>> [block_of(n) for n in ("layer4.2.conv3.weight", "blocks.3.1.conv_pw", "features.17.conv.0", "fc.weight")]
    ['layer4.2', 'blocks.3.1', 'features.17', 'fc']
    """
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            end = i + 1
            while end < len(parts) and parts[end].isdigit():
                end += 1
            return ".".join(parts[:end])
    return parts[0]


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of the backward pass.

    `inputs` are the deeper operations (nearer the model's input) it hands gradients to, as indices into `Graph.nodes`;
    `tensors` are the trainable parameters that hang on it directly, as indices into `Graph.tensors`.
    """

    kind: str
    module: str
    inputs: tuple[int, ...]
    tensors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One trainable parameter: the unit of selection."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) if self.shape else 1


@dataclass(frozen=True)
class Graph:
    """Autograd's own graph of one step, loss first.

    `nodes` stand in an order in which backward can run them (an operation before everything deeper); `tensors` stand in
    the order in which backward first meets them, output side first. A tensor used twice, or tied, hangs on several
    nodes. `unused` names the parameters that the loss never reaches: they have no gradient and can never be trained.
    """

    nodes: tuple[Node, ...]
    tensors: tuple[TensorInfo, ...]
    unused: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for index, node in enumerate(self.nodes):
            if any(deeper <= index for deeper in node.inputs):
                raise ProfileError(
                    f"graph node {index} ({node.kind}) hands a gradient to a node before it: not in backward order"
                )

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self.tensors)

    @cached_property
    def index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    @cached_property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor, the nodes it hangs on."""
        hosts: list[list[int]] = [[] for _ in self.tensors]
        for i, node in enumerate(self.nodes):
            for k in node.tensors:
                hosts[k].append(i)
        return tuple(map(tuple, hosts))

    @cached_property
    def head(self) -> tuple[str, ...]:
        """The output-most layer's tensors: those that share an owner with the first tensor backward meets.

        A tied tensor is left out: to train it means to reach every place that uses it, down to the input.
        """
        single = [t.name for k, t in enumerate(self.tensors) if len(self.hosts[k]) == 1]
        owner = single[0].rpartition(".")[0] if single else ""
        return tuple(name for name in single if name.rpartition(".")[0] == owner)

    @cached_property
    def leads_to(self) -> NDArray[np.uint8]:
        """Bit-packed rows, one a tensor: the nodes through which the loss reaches it (itself hosted included)."""
        width = (len(self.tensors) + 7) // 8
        below = np.zeros((len(self.nodes), width), dtype=np.uint8)
        for i in range(len(self.nodes) - 1, -1, -1):
            for k in self.nodes[i].tensors:
                below[i, k >> 3] |= 128 >> (k & 7)
            for j in self.nodes[i].inputs:
                below[i] |= below[j]
        if not len(self.nodes):
            return np.zeros((len(self.tensors), 0), dtype=np.uint8)
        by_tensor = np.unpackbits(below, axis=1, count=len(self.tensors)).T
        return np.packbits(by_tensor, axis=1)

    def indices(self, names: Iterable[str]) -> NDArray[np.intp]:
        """Positions of these tensors; an unknown name is an error that lists it."""
        wanted = list(names)
        unknown = [name for name in wanted if name not in self.index]
        if unknown:
            shown = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
            raise ProfileError(
                f"no such tensor in this profile: {shown}; its names are those of model.named_parameters()"
            )
        return np.fromiter((self.index[name] for name in dict.fromkeys(wanted)), dtype=np.intp)

    def reached(self, trained: NDArray[np.intp] | Sequence[int]) -> NDArray[np.bool_]:
        """Which nodes backward must run when exactly these tensors (by index) are trained."""
        rows = self.leads_to[np.asarray(trained, dtype=np.intp)]
        if not len(rows):
            return np.zeros(len(self.nodes), dtype=np.bool_)
        bits = np.bitwise_or.reduce(rows, axis=0)
        return np.unpackbits(bits, count=len(self.nodes)).view(np.bool_)

    def to_dict(self) -> dict[str, Any]:
        return {
            "nodes": [[n.kind, n.module, list(n.inputs), list(n.tensors)] for n in self.nodes],
            "tensors": [[t.name, list(t.shape), t.dtype, t.nbytes] for t in self.tensors],
            "unused": list(self.unused),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Graph:
        return cls(
            nodes=tuple(
                Node(kind, module, tuple(inputs), tuple(tensors)) for kind, module, inputs, tensors in data["nodes"]
            ),
            tensors=tuple(
                TensorInfo(name, tuple(shape), dtype, nbytes) for name, shape, dtype, nbytes in data["tensors"]
            ),
            unused=tuple(data["unused"]),
        )
