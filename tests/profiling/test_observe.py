"""What a step is said to hold against blocks of memory counted as they come and go."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import elastictrainer as et
from elastictrainer.profiling.fingerprint import tensors_in
from elastictrainer.profiling.observe import Counted, counted_forward_bytes, observe
from elastictrainer.profiling.profile import Profile
from elastictrainer.profiling.steps import Stepper
from elastictrainer.profiling.trace import trace
from tests.zoo import Dense, Inception, Residual, classify


class Narrowing(nn.Sequential):
    """Large activations at the input and small ones at the output: what trains only the latter peaks in forward."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for wide, narrow in ((3, 16), (16, 24), (24, 32)):
            layers += [nn.Conv2d(wide, narrow, 3, stride=2, padding=1), nn.BatchNorm2d(narrow), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3))


BATCH = torch.randn(8, 3, 32, 32), torch.arange(8) % 3
MODELS = {"narrowing": Narrowing, "residual": Residual, "dense": Dense, "inception": Inception}


LARGEST = 19 * 8 * 32 * 32 * 4  # the widest activation of them all, Dense's last
ABOUT = {"narrowing": {"rel": 0.1}}  # the others are a handful of layers: good to an activation, which is a lot of them


def _known(model):
    return [*model.parameters(), *model.buffers(), *tensors_in(BATCH)]


def _plans(profile):
    rng = np.random.default_rng(0)
    yield list(profile.names)
    yield list(profile.graph.head)
    for depth in range(1, len(profile.names), 2):
        kept = rng.random(depth) < rng.random()
        yield [name for name, keep in zip(profile.names, kept) if keep] + [profile.names[depth]]


def _counted(model, plan):
    """Blocks that forward and backward hold at most under a plan, beyond what was there before."""
    with et.apply(model, plan), Counted(_known(model)) as meter:
        classify(model, BATCH).backward()
    for parameter in model.parameters():
        parameter.grad = None
    return meter.peak()


@pytest.mark.parametrize("kind", MODELS)
def test_the_peak_of_any_plan_is_the_one_that_is_counted(kind):
    torch.manual_seed(0)
    model = MODELS[kind]()
    profile = et.profile(model, classify, BATCH, effort=12)
    for plan in _plans(profile):
        counted = profile.memory.base_bytes + _counted(model, plan)
        assert profile.peak_bytes(plan) == pytest.approx(counted, **ABOUT.get(kind, {"abs": LARGEST})), plan
        if len(plan) == len(profile.names):
            assert profile.peak_bytes(plan) == pytest.approx(counted, rel=0.05)


def test_a_plan_that_trains_little_peaks_in_the_forward_pass():
    model = Narrowing()
    profile = et.profile(model, classify, BATCH, effort=12)
    *backward, forward = profile.held_bytes(profile.graph.head).tolist()
    assert profile.peak_bytes(profile.graph.head) == forward > 1.2 * max(backward)
    first = 8 * 16 * 16 * 16 * 4
    assert profile.memory.forward_bytes >= 2 * first  # the first convolution's output, and its norm's
    again = et.Profile.from_json(profile.to_json())
    assert again.peak_bytes(profile.graph.head) == forward
    older = profile.to_dict()
    del older["memory"]["forward_bytes"]
    assert et.Profile.from_dict(older).peak_bytes(profile.graph.head) == max(backward)


class Greedy(torch.autograd.Function):
    """A kernel that asks for a buffer while its backward runs, as cuDNN's do."""

    NUMEL = 1 << 20

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        buffer = torch.ones(Greedy.NUMEL)
        return grad * buffer[0]


class WithGreedy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Narrowing(), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(Greedy.apply(self.inner(x)))


@pytest.mark.parametrize(
    "make", [Narrowing, Residual, Dense, WithGreedy], ids=["narrowing", "residual", "dense", "greedy"]
)
def test_asked_at_every_operation_an_allocator_tells_what_kernels_take(make):
    """The path of CUDA, with counted blocks as its allocator."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    profile = et.profile(model, classify, BATCH, optimizer=optimizer, effort=12)
    parameters = dict(model.named_parameters())
    traced = trace(model, classify, BATCH, parameters)
    model.zero_grad()
    stepper = Stepper(model, classify, BATCH, optimizer, [parameters[name] for name in traced.graph.names])
    stepper.step()
    plans = [tuple(range(len(profile.names))), tuple(profile.graph.index[name] for name in profile.graph.head)]
    mine = [copied for _, copied in stepper.pairs]
    states = [v for state in stepper.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    with et.apply(model, profile.names) as applied, Counted([*_known(model), *mine, *states]) as meter:
        memory = observe(
            stepper, traced, profile.memory, plans, lambda plan: applied.update([profile.names[k] for k in plan]), meter
        )
    seen = Profile(profile.graph, profile.lanes, memory, profile.error)
    for plan in _plans(seen):
        state = sum(4 * parameters[name].numel() for name in plan)
        counted = profile.memory.base_bytes + state + _counted(model, plan)
        assert seen.peak_bytes(plan) == pytest.approx(counted, abs=LARGEST), plan
        if len(plan) == len(profile.names):
            assert seen.peak_bytes(plan) == pytest.approx(counted, rel=0.01)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_a_model_that_cannot_be_watched_is_priced_without_forwards_own_need():
    def blind(model, batch):
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise NotImplementedError("knows no dispatch modes")
        return classify(model, batch)

    model = Residual()
    assert counted_forward_bytes(model, blind, BATCH) == 0
    assert counted_forward_bytes(model, classify, BATCH) > 0
