"""What cannot be timed is refused in words: the module, and the way out."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn

import elastictrainer as et
from elastictrainer.errors import ProfileError
from elastictrainer.profiling.refusals import refuse_model
from tests.zoo import _vectors, classify


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


def _spoilt(name: str) -> nn.Module:
    model = _layers()
    with torch.no_grad():
        model.get_parameter(name)[0] = float("inf")
    return model


class Overflows(nn.Module):
    def forward(self, x):
        return (x * 1e30) ** 2


def _backward(model, batch):
    loss = classify(model, batch)
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("model", "inputs", "loss_fn", "message"),
    [
        (
            _layers(),
            torch.full((4, 6), float("nan")),
            classify,
            "the batch holds values that are not finite",
        ),
        (_layers(), torch.zeros(0, 6), classify, "is nan, .* the batch is empty"),
        (_spoilt("2.bias"), None, classify, r"2\.bias holds values that are not finite; load good weights"),
        (nn.Sequential(nn.Linear(6, 6), Overflows(), nn.Linear(6, 3)), None, classify, "come out of '1'"),
        (_layers(), None, lambda m, b: classify(m, b) / 0, "is inf, .* the loss function's own doing"),
        (_layers(), None, _backward, r"loss_fn called backward\(\) itself \(0\.weight had"),
        (_layers(), None, lambda m, b: m(b[0]).sum() * 1j, r"the loss is complex \(torch\.complex64\)"),
        (
            _layers(),
            torch.ones(4, 6, device="meta"),
            classify,
            "fails in .0., and the batch is on meta .* on cpu",
        ),
    ],
    ids=["batch", "empty", "weights", "module", "loss", "backward", "complex", "device"],
)
def test_a_loss_that_nothing_could_learn_from_is_refused_by_what_made_it(model, inputs, loss_fn, message):
    _, (good, labels), _ = _vectors(model)
    inputs = good if inputs is None else inputs
    before, stream = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(ProfileError, match=message):
        et.profile(model, loss_fn, (inputs, labels[: len(inputs)]), effort=12)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(p.grad is None and p.requires_grad and not p._backward_hooks for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes came with Python 3.11")
def test_an_error_of_the_models_own_says_in_which_module_it_was():
    model, (_, labels), loss_fn = _vectors(nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(5, 3))))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        et.profile(model, loss_fn, (torch.randn(4, 6), labels), effort=12)
    assert caught.value.__notes__ == ["while profiling: the forward pass failed in '1.0'"]


def test_an_optimizer_that_steps_inside_backward_would_leave_traces_and_is_refused():
    model, batch, loss_fn = _vectors(_layers())
    steps = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: steps[p].step())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ProfileError, match=r"^0\.weight has a hook that runs whenever its gradient is ready"):
        et.profile(model, loss_fn, batch, effort=12)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_a_model_in_several_places_is_refused_by_name():
    class Elsewhere(nn.Parameter):
        device = torch.device("cuda", 1)

    model = _layers()
    there = Elsewhere(torch.zeros(3))
    with pytest.raises(ProfileError, match=r"^2\.bias is on cuda:1 and 0\.weight on cpu: a profile is of one device"):
        refuse_model(model, {"0.weight": model[0].weight, "2.bias": there})
