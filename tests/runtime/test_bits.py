"""ReLUs that keep bits: the same gradients, a 32nd of the bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastictrainer.metrics.held import held_bytes
from elastictrainer.runtime.apply import apply
from elastictrainer.runtime.bits import pack, unpack


@given(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.integers(0, 99))
def test_packing_is_undone(shape: list[int], seed: int) -> None:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    bits = pack(mask)
    assert bits.numel() == -(-mask.numel() // 8)
    assert torch.equal(unpack(bits, mask.shape), mask)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("kind", [nn.ReLU, nn.ReLU6])
def test_gradients_are_bit_equal_at_every_edge(kind: type[nn.Module], inplace: bool) -> None:
    edges = torch.tensor([-1.0, -0.0, 0.0, 1e-30, 3.0, 6.0, 6.0001, float("inf"), -float("inf"), float("nan"), 5.9])
    found = []
    for bits in (False, True):
        model = nn.Sequential(nn.Identity(), kind(inplace=inplace))
        with apply(model, [], bits=bits):
            x = edges.clone().requires_grad_()
            y = model(x * 1.0)
            y.backward(torch.arange(1.0, 12.0))
            found.append((y.detach(), x.grad))
    for a, b in zip(*found):
        assert torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))


@pytest.mark.parametrize("given", ["as it lies", "turned round", "expanded"])
def test_in_channels_last_gradients_are_bit_equal_and_stay_in_that_layout(given: str) -> None:
    torch.manual_seed(0)
    grad = torch.randn(2, 5, 3, 7)
    if given == "as it lies":
        grad = grad.contiguous(memory_format=torch.channels_last)
    elif given == "expanded":  # as a mean over positions hands it back
        grad = torch.randn(2, 5, 1, 1).expand(2, 5, 3, 7)
    x = (4 * torch.randn(2, 5, 3, 7)).contiguous(memory_format=torch.channels_last)
    found = []
    for bits in (False, True):
        model = nn.Sequential(nn.ReLU6())
        with apply(model, [], bits=bits):
            leaf = x.clone().requires_grad_()
            model(leaf).backward(grad)
            found.append(leaf.grad)
    assert torch.equal(*found)
    assert found[1].is_contiguous(memory_format=torch.channels_last)


def test_bytes_held_are_bits() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.BatchNorm2d(4), nn.ReLU6())
    x = torch.randn(2, 3, 32, 32)

    def held(bits: bool) -> int:
        with apply(model, ["0.bias"], bits=bits):
            return held_bytes(lambda: model(x).sum(), model)

    elements = 2 * 4 * 32 * 32
    assert held(False) >= 2 * 4 * elements
    assert held(True) <= 2 * elements // 8 + 256


def test_off_by_default_and_taken_back() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with apply(model, ["0.weight"]):
        assert "forward" not in model[1].__dict__
    with apply(model, ["0.weight"], bits=True):
        assert "forward" in model[1].__dict__
    assert "forward" not in model[1].__dict__
