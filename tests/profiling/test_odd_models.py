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


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.filter = nn.Parameter(torch.randn(6, 6, dtype=torch.cfloat))

    def forward(self, x):
        return self.head((torch.fft.fft(self.inner(x)) @ self.filter).abs())


class Answers(nn.Module):
    """Several answers by name, one of them no tensor; one block that stands at two places of the tree."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU())
        self.first, self.again = block, nn.Sequential(block, nn.Linear(6, 6), block)
        self.label, self.size = nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, x):
        hidden = self.again(self.first(x))
        return {"label": self.label(hidden), "size": self.size(hidden), "count": len(x)}


def _two_terms(model, batch):
    answers = model(batch[0])
    return F.cross_entropy(answers["label"], batch[1]) + 0.1 * answers["size"].square().mean()


def _gradient_penalty(model, batch):
    x = batch.clone().requires_grad_()
    y = model(x).sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    return y + slope.square().mean()


def _packed(model, batch):
    return model(batch)[0].data.square().mean()


def _hooked() -> nn.Module:
    model = _layers()
    model[0].weight.register_hook(lambda grad: grad * 2)
    return model


PRICED = {
    "complex numbers": lambda: _vectors(Complex()),
    "a dictionary of answers": lambda: (Answers(), _vectors(nn.Identity())[1], _two_terms),
    # the gradient of a sum is one number stretched to a shape: several elements in one place
    "gradient penalty": lambda: (nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)), torch.randn(4, 6), _gradient_penalty),  # noqa: E501
    "packed sequences": lambda: (nn.LSTM(6, 4, bidirectional=True), nn.utils.rnn.pack_sequence([torch.randn(3, 6), torch.randn(2, 6)]), _packed),  # noqa: E501
    "hooks of its own": lambda: _vectors(_hooked()),
    "low precision": lambda: (_layers().bfloat16(), (torch.randn(4, 6).bfloat16(), torch.arange(4) % 3), classify),
    "bag of words": lambda: (
        nn.Sequential(nn.EmbeddingBag(9, 6), nn.Linear(6, 3)), (torch.randint(0, 9, (4, 5)), torch.arange(4) % 3), classify  # noqa: E501
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PRICED)
def test_unusual_models_are_priced_without_a_trace(name):
    torch.manual_seed(0)
    model, batch, loss_fn = PRICED[name]()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    profile = et.profile(model, loss_fn, batch, effort=12)
    assert set(profile.names) == {n for n, _ in model.named_parameters()}
    assert profile.full_step_s > profile.forward_s > 0
    assert et.Profile.from_json(profile.to_json()).to_json() == profile.to_json()
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


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
