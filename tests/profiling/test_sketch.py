"""The two ends of a price list, for less than half of what the least profile costs."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

import elastictrainer as et
from elastictrainer.profiling import sketch as sketching
from elastictrainer.profiling.sketch import is_sketch, least_profile_s, sketch
from elastictrainer.runtime.capture import Uncapturable
from tests.zoo import ZOO


class Recorder:
    """Of a device that does everything at once: what is replayed is done again."""

    def __init__(self, fails=""):
        self.fails = fails

    @contextmanager
    def listening(self):
        yield []

    def record(self, step):
        if self.fails:
            raise Uncapturable(self.fails)
        return step


@pytest.fixture(params=["residual", "tied text", "lstm"])
def task(request):
    torch.manual_seed(0)
    model, batch, loss_fn = ZOO[request.param]()
    return model, batch, loss_fn, torch.optim.AdamW(model.parameters(), lr=0.1)


def test_both_ends_are_what_was_timed_and_nothing_moves(task):
    model, batch, loss_fn, optimizer = task
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = sketch(model, loss_fn, batch, optimizer=optimizer)
    assert is_sketch(made)
    assert not is_sketch(et.profile(model, loss_fn, batch, optimizer=optimizer, effort=12))
    assert not is_sketch(None)
    assert made.full_step_s == pytest.approx(made.context["launched_step_s"], rel=1e-6)
    assert 0 < made.forward_s <= made.step_s(made.graph.head or made.names[:1]) <= made.full_step_s
    assert made.error.p95 == 1.0  # of what lies between it knows nothing, and says so
    assert made.peak_bytes(made.names) > made.peak_bytes(made.graph.head)
    assert least_profile_s(made) == pytest.approx(21 * made.full_step_s)
    assert et.Profile.from_json(made.to_json()).to_json() == made.to_json()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())


def test_it_costs_less_than_half_of_the_least_profile(task):
    model, batch, loss_fn, optimizer = task
    calls = []

    def counted(model, batch):
        calls.append(1)
        return loss_fn(model, batch)

    sketch(model, counted, batch, optimizer=optimizer)
    cost = len(calls)
    et.profile(model, counted, batch, optimizer=optimizer, effort=12)
    assert 2 * cost < len(calls) - cost


@pytest.mark.parametrize("fails", ["", "not permitted"])
def test_of_replayed_steps(task, fails, monkeypatch):
    model, batch, loss_fn, _ = task
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # Adam's counts of steps would have to lie on a GPU
    monkeypatch.setattr(sketching, "find_recorder", lambda device: Recorder(fails))
    made = sketch(model, loss_fn, batch, optimizer=optimizer, captured=True)
    assert made.captured == (not fails)
    assert made.context.get("captured", False) == (not fails)
    assert made.full_step_s > 0
    assert (least_profile_s(made) > 21 * made.context["launched_step_s"]) == (not fails)  # recordings take time, too
