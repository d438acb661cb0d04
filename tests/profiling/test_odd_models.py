"""Models that are unusual in how they are built: priced, or refused by name with the way out."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import elastictrainer as et
from elastictrainer.errors import ConfigError, ProfileError
from tests.zoo import _vectors, classify


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


def _in_place(part: str) -> nn.Module:
    model = _layers()
    model.get_submodule(part).compile(backend="eager")
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.compile(_layers(), backend="eager"),
        lambda: nn.Sequential(torch.compile(nn.Linear(6, 6), backend="eager"), nn.ReLU(), nn.Linear(6, 3)),
        lambda: _in_place(""),
        lambda: _in_place("0"),
    ],
    ids=["whole", "part", "whole in place", "part in place"],
)
def test_compiled_modules_are_priced_as_what_they_were_compiled_from(make):
    model, batch, loss_fn = _vectors(make())
    profile = et.profile(model, loss_fn, batch, effort=12)
    plain = et.profile(*_reordered(_vectors(_layers())), effort=12)
    assert [node.kind for node in profile.graph.nodes] == [node.kind for node in plain.graph.nodes]
    torch._dynamo.reset()


def _reordered(case):
    model, batch, loss_fn = case
    return model, loss_fn, batch


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 6, sparse=True), nn.Linear(6, 3)

    def forward(self, tokens):
        return self.head(self.words(tokens).mean(1))


@pytest.mark.parametrize(
    "make",
    [
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        lambda m: torch.optim.SparseAdam(m.words.parameters()),
    ],
    ids=["sgd", "sparse adam"],
)
def test_sparse_gradients_are_priced_as_sparse(make):
    model = Words()
    profile = et.profile(
        model, classify, (torch.randint(0, 9, (4, 5)), torch.arange(4) % 3), optimizer=make(model), effort=12
    )
    assert "words.weight" in profile.names


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 6), nn.LazyLinear(3)), r"^1\.weight has no shape yet: run one batch"),
        (lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3, device="meta")), r"^1\.weight is on the meta device"),
    ],
    ids=["lazy", "meta"],
)
def test_parameters_that_are_not_there_yet_are_named(make, message):
    model, batch, loss_fn = _vectors(make())
    with pytest.raises(ProfileError, match=message):
        et.profile(model, loss_fn, batch, effort=12)


def test_what_is_no_module_and_no_number_of_steps_is_refused():
    model, batch, loss_fn = _vectors(_layers())
    with pytest.raises(ConfigError, match=r"torch\.nn\.Module, not a function"):
        et.profile(F.relu, loss_fn, batch)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="effort 'many'"):
        et.profile(model, loss_fn, batch, effort="many")  # type: ignore[arg-type]
