"""Random backward graphs with random prices, as profiles: what the solver's properties are tested on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from elastictrainer.graph import Graph, Node, TensorInfo
from elastictrainer.profiling.profile import Lane, Memory, Profile, Residual, Storage

Rng = np.random.Generator


class Wires:
    """A graph under construction: nodes loss first, each with the deeper nodes it feeds and its number of tensors."""

    def __init__(self) -> None:
        self.inputs: list[list[int]] = []
        self.tensors: list[list[int]] = []
        self.count = 0

    def node(self, *above: int, tensors: int = 0, tied: tuple[int, ...] = ()) -> int:
        """A node below these, with new tensors and tied ones."""
        here = len(self.inputs)
        self.inputs.append([])
        self.tensors.append([*range(self.count, self.count + tensors), *tied])
        self.count += tensors
        for node in above:
            self.inputs[node].append(here)
        return here

    def graph(self) -> Graph:
        nodes = tuple(
            Node("Op", f"layer{i}", tuple(self.inputs[i]), tuple(self.tensors[i])) for i in range(len(self.inputs))
        )
        return Graph(
            nodes, tuple(TensorInfo(f"layer{k}.weight", (k + 1,), "float32", 4 * (k + 1)) for k in range(self.count))
        )


def chain(rng: Rng, size: int) -> Graph:
    wires = Wires()
    at = wires.node()
    while wires.count < size:
        at = wires.node(at, tensors=int(rng.integers(0, min(3, size - wires.count) + 1)))
    return wires.graph()


def residual(rng: Rng, size: int) -> Graph:
    wires = Wires()
    at = wires.node()
    while wires.count < size:
        add = main = short = wires.node(at)
        for _ in range(rng.integers(1, 4)):
            main = wires.node(main, tensors=int(rng.integers(0, 3)))
        for _ in range(rng.integers(0, 3)):
            short = wires.node(short, tensors=int(rng.integers(0, 2)))
        at = wires.node(*{main, short} - ({add} if short != add else set()), tensors=int(rng.integers(0, 2)))
    return wires.graph()


def dense(rng: Rng, size: int) -> Graph:
    """Every layer of a block feeds all deeper ones of the block (in backward order)."""
    wires = Wires()
    at = wires.node()
    while wires.count < size:
        block = [at]
        for _ in range(rng.integers(2, 5)):
            block.append(wires.node(*block, tensors=int(rng.integers(0, 2))))
        at = wires.node(block[-1], tensors=1)
    return wires.graph()


def tied(rng: Rng, size: int) -> Graph:
    """A chain, or a residual network, in which some tensors are used again deeper down."""
    wires = Wires()
    at = wires.node()
    while wires.count < size:
        again = tuple(rng.choice(wires.count, size=1).tolist()) if wires.count and rng.random() < 0.3 else ()
        below = wires.node(at, tensors=int(rng.integers(0, 2)), tied=again)
        at = wires.node(at, below, tensors=1) if rng.random() < 0.3 else below
    return wires.graph()


def weight_norm(rng: Rng, size: int) -> Graph:
    """A chain whose weights are each made from two tensors by a dead-end operation, with a shortcut now and then."""
    wires = Wires()
    at = wires.node()
    while wires.count < size:
        layer = wires.node(at, tensors=int(rng.integers(0, 2)))
        side = wires.node(layer, tensors=2)
        if rng.random() < 0.4:
            wires.node(side, tensors=2)
        at = wires.node(layer, at) if rng.random() < 0.4 else layer
    return wires.graph()


def two_towers(rng: Rng, size: int) -> Graph:
    wires = Wires()
    top = wires.node(tensors=1)
    left = right = top
    while wires.count < size:
        if rng.random() < 0.5:
            left = wires.node(left, tensors=int(rng.integers(0, 2)))
        else:
            right = wires.node(right, tensors=int(rng.integers(0, 2)))
        if rng.random() < 0.15 and left != right:
            left = right = wires.node(left, right)
    return wires.graph()


def tangle(rng: Rng, size: int) -> Graph:
    """Anything goes: every node hangs below one to three others, every tensor on one to three nodes."""
    wires = Wires()
    wires.node()
    while wires.count < size:
        above = rng.choice(len(wires.inputs), size=min(len(wires.inputs), int(rng.integers(1, 4))), replace=False)
        again = tuple(rng.choice(wires.count, size=1).tolist()) if wires.count and rng.random() < 0.2 else ()
        wires.node(*map(int, above), tensors=int(rng.integers(0, 2)), tied=again)
    return wires.graph()


KINDS: dict[str, Callable[[Rng, int], Graph]] = {
    f.__name__: f for f in (chain, residual, dense, tied, weight_norm, two_towers, tangle)
}


def priced(graph: Graph, rng: Rng, *, lanes: int = 1) -> Profile:
    """A profile at random prices: heavy tails, free operations, light tensors, storages that neighbours share."""
    nodes, tensors = len(graph.nodes), len(graph.tensors)

    def seconds(count: int, free: float) -> np.ndarray:
        return np.where(rng.random(count) < free, 0.0, rng.lognormal(0.0, 1.0, count)) * 1e-3

    def lane(name: str) -> Lane:
        return Lane(
            name=name,
            forward_total_s=float(rng.lognormal(0, 1)) * nodes * 1e-4,
            overhead_s=1e-4,
            forward_s=np.zeros(nodes),
            fused_s=seconds(nodes, 0.6),
            pass_s=seconds(nodes, 0.2),
            dw_s=seconds(tensors, 0.05) * rng.choice([0.05, 1.0], tensors),
            opt_s=seconds(tensors, 0.5) * 0.1,
        )

    storages = []
    for n, node in enumerate(graph.nodes):
        for _ in range(rng.integers(0, 3)):
            holders = {n, *(m for m in node.inputs if rng.random() < 0.3)} if rng.random() < 0.7 else set()
            keepers = tuple(k for k in node.tensors if rng.random() < 0.5)
            if holders or keepers:
                storages.append(Storage(int(rng.integers(1, 5000)), tuple(sorted(holders)), keepers))
    memory = Memory(
        base_bytes=int(rng.integers(0, 10_000)),
        storages=tuple(storages),
        workspace_bytes=rng.integers(0, 4000, nodes),
        state_bytes=rng.choice([0, 1, 2], tensors) * np.asarray([t.nbytes for t in graph.tensors], dtype=np.int64),
        forward_bytes=int(rng.choice([0, rng.integers(0, 20_000)])),
    )
    return Profile(
        graph,
        tuple(lane(name) for name in ("cpu",) if lanes == 1) or (lane("launch"), lane("device")),
        memory,
        Residual(0.01, 0.03, 8),
    )


def scored(profile: Profile, rng: Rng, *, negative: float = 0.25) -> dict[str, float]:
    """Importance: lognormal, with this share of it negative."""
    values = rng.lognormal(0.0, 1.0, len(profile.names))
    return dict(zip(profile.names, np.where(rng.random(len(values)) < negative, -values, values).tolist()))


@st.composite
def cases(
    draw: st.DrawFn, *, most: int = 12, kinds: tuple[str, ...] = tuple(KINDS), lanes: int = 1
) -> tuple[Profile, dict[str, float]]:
    """A priced graph of any kind, and scores."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    profile = priced(KINDS[draw(st.sampled_from(kinds))](rng, draw(st.integers(1, most))), rng, lanes=lanes)
    return profile, scored(profile, rng)
