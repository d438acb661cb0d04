"""The traced graph against autograd itself: what it says is reached is what autograd would run."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from elastictrainer.errors import ProfileError
from elastictrainer.graph import Graph, Node, TensorInfo
from elastictrainer.profiling.timing import deepest
from elastictrainer.profiling.trace import _walk, trace
from tests.zoo import ZOO, Checkpointed, Recurrent, _vectors


def _trace(case):
    model, batch, loss_fn = case
    return trace(model, loss_fn, batch, dict(model.named_parameters()))


def _kinds(model, batch, loss_fn, trained):
    """The operations that autograd records when exactly these tensors require a gradient."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    return Counter(node.name() for node in _walk(loss_fn(model, batch)) if not hasattr(node, "variable"))


@pytest.mark.parametrize("name", ZOO)
def test_reached_is_what_the_engine_runs(name):
    """The engine's own word: of the full graph, the nodes it runs for these inputs alone."""
    torch.manual_seed(0)
    model, batch, loss_fn = case = ZOO[name]()
    traced = _trace(case)
    parameters = dict(model.named_parameters())
    rng = np.random.default_rng(1)
    for _ in range(8):
        chosen = np.flatnonzero(rng.random(len(traced.graph.tensors)) < rng.random())
        if not len(chosen):
            continue
        live = traced.locate(loss_fn(model, batch))
        ran: set[int] = set()
        for i, node in enumerate(live.operations):
            node.register_prehook(lambda _, i=i, ran=ran: ran.add(i))
        live.loss.backward(inputs=[parameters[traced.graph.names[k]] for k in chosen])
        assert ran == set(np.flatnonzero(traced.graph.reached(chosen)))


# torch.matmul folds a resting weight into other operations than a trained one, so the tied one is left out
@pytest.mark.parametrize("name", [name for name in ZOO if name != "tied text"])
def test_reached_is_what_autograd_records(name):
    torch.manual_seed(0)
    case = ZOO[name]()
    traced = _trace(case)
    rng = np.random.default_rng(0)
    for _ in range(12):
        chosen = np.flatnonzero(rng.random(len(traced.graph.tensors)) < rng.random())
        if not len(chosen):
            continue
        reached = traced.graph.reached(chosen)
        predicted = Counter(node.kind for node, hit in zip(traced.graph.nodes, reached) if hit)
        assert predicted == _kinds(*case, {traced.graph.names[k] for k in chosen})


@pytest.mark.parametrize("name", ZOO)
def test_every_used_tensor_is_found_once_and_every_unused_one_named(name):
    model, batch, loss_fn = case = ZOO[name]()
    graph = _trace(case).graph
    model.zero_grad()
    loss_fn(model, batch).backward()
    with_gradient = {n for n, p in model.named_parameters() if p.grad is not None}
    assert set(graph.names) == with_gradient
    assert len(set(graph.names)) == len(graph.names)
    assert set(graph.unused) == {n for n, _ in model.named_parameters()} - with_gradient


def test_a_weight_used_twice_hangs_on_both_operations():
    graph = _trace(ZOO["used twice"]()).graph
    assert len(graph.hosts[graph.index["shared.bias"]]) == 2
    assert len(graph.hosts[graph.index["inner.bias"]]) == 1


def test_a_tied_weight_reaches_to_the_input_and_is_no_head():
    graph = _trace(ZOO["tied text"]()).graph
    assert graph.reached([graph.index["tokens.weight"]]).sum() > graph.reached([graph.index["positions"]]).sum() - 2
    assert "tokens.weight" not in graph.head


def test_training_the_shortcut_is_not_charged_for_the_main_path():
    graph = _trace(ZOO["residual"]()).graph
    reached = graph.reached([graph.index["shortcut.weight"]])
    owners = {node.module for node, hit in zip(graph.nodes, reached) if hit}
    assert not any(owner.startswith("main") for owner in owners)


def test_backward_order_is_not_the_order_of_named_parameters():
    """Trap 10: parameters declared in another order than they run."""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(6, 3), nn.Linear(6, 6)

        def forward(self, x):
            return self.last(self.first(x))

    graph = _trace(_vectors(Backwards())).graph
    assert [name.split(".")[0] for name in graph.names] == ["last", "last", "first", "first"]
    assert set(graph.head) == {"last.weight", "last.bias"}


def test_modules_are_named():
    graph = _trace(ZOO["residual"]()).graph
    convolutions = {node.module for node in graph.nodes if node.kind == "ConvolutionBackward0"}
    assert convolutions == {"stem", "main.0", "main.3", "shortcut"}


def test_reentrant_checkpointing_is_refused_by_name():
    """Trap 8."""
    with pytest.raises(ProfileError, match=r"^the model uses re-entrant checkpointing.*use_reentrant=False"):
        _trace(_vectors(Checkpointed(reentrant=True)))


class Blocks(nn.Module):
    """Checkpointing as libraries do it, in one block of several."""

    def __init__(self) -> None:
        super().__init__()
        inner = Checkpointed(reentrant=True)
        inner.head = nn.Linear(6, 6)
        self.blocks, self.head = nn.Sequential(nn.Linear(6, 6), inner, nn.Linear(6, 6)), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.blocks(x))


def test_the_module_that_checkpoints_is_named():
    with pytest.raises(ProfileError, match=r"^blocks\.1 uses re-entrant checkpointing"):
        _trace(_vectors(Blocks()))


def test_a_graph_that_changes_between_passes_is_refused():
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.calls = nn.Linear(6, 3), 0

        def forward(self, x):
            self.calls += 1
            return self.head(x) if self.calls % 2 else self.head(x).relu()

    model, batch, loss_fn = case = _vectors(Moody())
    traced = _trace(case)
    with pytest.raises(ProfileError, match="same operations every time"):
        traced.locate(loss_fn(model, batch))


@pytest.mark.parametrize(("first", "named"), [(True, "1"), (False, "0")], ids=["gone", "new"])
def test_what_changes_between_passes_is_named(first, named):
    class Skipped(nn.Module):
        """A residual block that is there every other time."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.there = nn.Linear(6, 6), not first

        def forward(self, x):
            self.there = not self.there
            return x + self.inner(x) if self.there else x

    model = nn.Sequential(nn.Linear(6, 6), Skipped(), nn.Linear(6, 3))
    model, batch, loss_fn = case = _vectors(model)
    traced = _trace(case)
    with pytest.raises(ProfileError, match=f"first in '{named}' or right after it"):
        traced.locate(loss_fn(model, batch))


def test_wrong_losses_are_refused_in_words():
    model, batch, _ = _vectors(nn.Linear(6, 3))
    for loss_fn, message in [
        (lambda m, b: m(b[0]), "scalar"),
        (lambda m, b: 1.0, "scalar"),
        (lambda m, b: m(b[0]).sum().detach(), "does not depend on any trainable"),
    ]:
        with pytest.raises(ProfileError, match=message):
            trace(model, loss_fn, batch, dict(model.named_parameters()))


@pytest.mark.parametrize("name", ZOO)
def test_the_deepest_tensors_make_every_shared_operation_run(name):
    traced = _trace(ZOO[name]())
    graph = traced.graph
    reached = graph.reached(deepest(traced))
    leads = np.unpackbits(graph.leads_to, axis=1, count=len(graph.nodes)).sum(axis=0)
    assert reached[leads > 1].all()


def test_recurrent_layers_are_single_operations():
    model = Recurrent()
    traced = _trace((model, (torch.randn(2, 5, 6), torch.tensor([0, 1])), ZOO["lstm"]()[2]))
    assert set(traced.graph.names) == {n for n, _ in model.named_parameters()}


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 12))
    tensors = draw(st.integers(1, 10))
    nodes = []
    for i in range(count):
        deeper = draw(st.sets(st.integers(i + 1, count - 1), max_size=3)) if i + 1 < count else set()
        hung = draw(st.sets(st.integers(0, tensors - 1), max_size=2))
        nodes.append(Node("op", "", tuple(sorted(deeper)), tuple(sorted(hung))))
    return Graph(tuple(nodes), tuple(TensorInfo(f"t{k}", (1,), "float32", 4) for k in range(tensors)))


@settings(max_examples=100, deadline=None)
@given(graphs(), st.data())
def test_reached_equals_a_naive_search(graph, data):
    trained = data.draw(st.sets(st.integers(0, len(graph.tensors) - 1)))

    def leads(i):
        return bool(trained & set(graph.nodes[i].tensors)) or any(leads(j) for j in graph.nodes[i].inputs)

    assert graph.reached(sorted(trained)).tolist() == [leads(i) for i in range(len(graph.nodes))]
    assert Graph.from_dict(graph.to_dict()) == graph


def test_a_graph_out_of_order_is_refused():
    with pytest.raises(ProfileError, match="not in backward order"):
        Graph((Node("a", "", (), ()), Node("b", "", (0,), ())), ())


def test_unknown_names_are_listed():
    graph = Graph((Node("a", "", (), (0,)),), (TensorInfo("w", (1,), "float32", 4),))
    with pytest.raises(ProfileError, match="no such tensor in this profile: nose"):
        graph.indices(["w", "nose"])
