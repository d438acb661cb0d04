from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from elastictrainer.errors import ModelError
from elastictrainer.runtime.apply import apply
from elastictrainer.runtime.untouched import untouched


class Wayward(nn.Module):
    """Does to its buffers, in one forward pass, everything that real modules do to theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight  # tied
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("swapped", torch.zeros(3))
        self.register_buffer("expanded", torch.zeros(1).expand(4))
        self.register_buffer("nan", torch.full((2,), float("nan")))
        self.register_buffer("absent", None)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("alias", self.scratch, persistent=False)
        self.register_buffer("part", self.scratch[:1], persistent=False)
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        with torch.inference_mode():
            self.register_buffer("inference", torch.zeros(2))
        self.register_buffer("meta", torch.zeros(2, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        self.replaced = self.replaced + 1
        self.swapped.data = torch.ones(7)
        self.expanded.as_strided((1,), (1,)).add_(1)
        self.nan.zero_()
        self.absent = torch.ones(1)
        self.scratch.add_(1)
        self.sparse.mul_(2)
        with torch.inference_mode():
            self.inference.add_(1)
        self.register_buffer("new", torch.ones(1), persistent=False)
        return self.out(self.drop(self.norm(self.embed(x))))


def bits(tensor: Tensor | None) -> object:
    if tensor is None or tensor.is_meta:
        return None
    return tensor.to_dense().clone().numpy().tobytes()


def snapshot(model: nn.Module) -> dict[str, object]:
    """Everything that must not move, with identities; objects are held so that an id cannot be reused."""
    buffers = [(m, n, b) for m in model.modules() for n, b in m._buffers.items()]
    return {
        "buffers": [(id(m), n, b, bits(b), None if b is None else (b.shape, b.data_ptr() if not b.is_sparse else 0))
                    for m, n, b in buffers],
        "persistent": list(model.state_dict()),
        "training": [m.training for m in model.modules()],
        "flags": [p.requires_grad for p in model.parameters()],
        "grads": [(p.grad, bits(p.grad)) for p in model.parameters()],
        "weights": [bits(p.detach()) for p in model.parameters()],
        "random": (random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()),  # noqa: NPY002
    }  # fmt: skip


def same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def disturb(model: nn.Module) -> None:
    random.random()
    np.random.rand(3)  # noqa: NPY002
    for parameter in model.parameters():
        assert parameter.grad is None
        parameter.requires_grad_(True)
    model(torch.tensor([0, 1, 2, 4])).sum().backward()
    model.eval()


@pytest.mark.parametrize("fails", [False, True])
def test_no_trace(fails: bool) -> None:
    model = Wayward()
    model.norm.eval()
    model.norm.bias.requires_grad_(False)
    model.embed.weight.grad = torch.ones_like(model.embed.weight)
    before = snapshot(model)
    with suppress(InterruptedError), untouched(model):
        disturb(model)
        if fails:
            raise InterruptedError
    after = snapshot(model)
    for key in before:
        assert same(before[key], after[key]), key


def test_the_same_random_numbers_follow() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    x = torch.ones(4, 3)
    torch.manual_seed(3)
    expected = model(x)
    torch.manual_seed(3)
    with untouched(model):
        model(x)
    assert torch.equal(model(x), expected)


def test_a_graph_made_before_can_still_go_backward() -> None:
    """Restoring must not count as an in-place change of what autograd has saved."""
    model = nn.BatchNorm1d(3).eval()
    loss = model(torch.randn(4, 3)).square().sum()
    with untouched(model):
        pass
    loss.backward()
    assert model.weight.grad is not None


def test_nested() -> None:
    model = nn.BatchNorm1d(3)
    before = snapshot(model)
    with untouched(model):
        with untouched(model):
            model(torch.randn(4, 3))
        assert same(snapshot(model)["buffers"], before["buffers"])
        model(torch.randn(4, 3))
    assert same(snapshot(model)["buffers"], before["buffers"])


def test_a_held_layer_gets_back_the_mode_that_was_asked_of_it() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    applied = apply(model, ["0.weight"], bn="frozen")
    with untouched(model):
        model.eval()
    applied.undo()
    assert model[1].training


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_model_is_refused() -> None:
    with pytest.raises(ModelError, match=r"0\.weight is lazy"), untouched(nn.Sequential(nn.LazyLinear(3))):
        pass


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_every_cuda_stream() -> None:
    model = nn.Dropout(0.5).cuda()
    torch.rand(1, device="cuda")
    before = torch.cuda.get_rng_state_all()
    with untouched(model):
        model(torch.ones(100, device="cuda"))
    assert all(map(torch.equal, before, torch.cuda.get_rng_state_all()))
