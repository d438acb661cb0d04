"""Flags, names, undo and re-plans: what `apply` promises about parameters."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from elastictrainer.errors import ConfigError
from elastictrainer.runtime.apply import apply


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.mid = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.mid(self.embed(x)))


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(64, 2),
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(5, 3, 8, 8, generator=generator)).square().mean().backward()
    optimizer.step()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


NAMES = [name for name, _ in small().named_parameters()]
plans = st.lists(st.sets(st.sampled_from(NAMES), min_size=1), min_size=1, max_size=4)


@settings(deadline=None, max_examples=30)
@given(plans)
def test_exactly_the_named_tensors_move_through_any_sequence_of_plans(sequence: list[set[str]]) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    applied = apply(model, sequence[0], optimizer=optimizer)
    for seed, plan in enumerate(sequence):
        applied.update(plan)
        assert set(applied.trainable) == plan
        assert {n for n, p in model.named_parameters() if p.requires_grad} == plan
        before = weights(model)
        step(model, optimizer, seed)
        assert {n for n, p in model.named_parameters() if not torch.equal(p, before[n])} == plan
    applied.undo()
    assert all(p.requires_grad for p in model.parameters())


def test_undo_restores_flags_and_is_idempotent() -> None:
    model = small()
    model[0].weight.requires_grad_(False)
    flags = {n: p.requires_grad for n, p in model.named_parameters()}
    applied = apply(model, ["0.weight", "6.weight"])
    assert model[0].weight.requires_grad
    applied.update(["6.bias"])
    assert not model[0].weight.requires_grad
    applied.undo()
    assert {n: p.requires_grad for n, p in model.named_parameters()} == flags
    model[6].weight.requires_grad_(False)
    applied.undo()
    assert not model[6].weight.requires_grad
    with pytest.raises(ConfigError, match="undone"):
        applied.update(["6.bias"])


def test_a_parameter_that_was_frozen_before_is_no_candidate() -> None:
    model = small()
    model[3].weight.requires_grad_(False)
    with apply(model, ["6.weight"]):
        assert not model[3].weight.requires_grad
    assert not model[3].weight.requires_grad
    assert model[0].weight.requires_grad


def test_the_context_manager_undoes_on_error() -> None:
    model = small()
    with pytest.raises(RuntimeError, match="mine"), apply(model, ["6.bias"]):
        raise RuntimeError("mine")
    assert all(p.requires_grad for p in model.parameters())


def test_a_second_apply_replaces_the_first() -> None:
    model = small()
    first = apply(model, ["6.bias"])
    second = apply(model, ["0.weight"], bn="track")
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {"0.weight"}
    first.undo()  # it no longer stands: nothing happens
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {"0.weight"}
    second.undo()
    assert all(p.requires_grad for p in model.parameters())
    assert all(m.training for m in model.modules())


def test_a_plan_on_top_of_another_gives_it_back() -> None:
    """As when a run profiles again: the controller's plan stands, and `et.profile` applies others for a while."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    outer = apply(model, ["6.bias"], optimizer=optimizer)
    hooks = len(optimizer._optimizer_step_pre_hooks)
    with apply(model, NAMES, bn="track") as inner:
        assert all(p.requires_grad for p in model.parameters())
        assert model.train()[1].training
        with pytest.raises(ConfigError, match="on top"):
            outer.update(["6.weight"])
        inner.update(["0.weight"])
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {"6.bias"}
    assert not model.train()[1].training
    assert len(optimizer._optimizer_step_pre_hooks) == hooks
    outer.update(["6.weight"])
    step(model, optimizer)
    middle, top = apply(model, ["0.weight"]), apply(model, ["0.bias"])
    middle.undo()
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {"0.bias"}
    top.undo()
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {"6.weight"}
    outer.undo()
    assert all(p.requires_grad for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks


def test_handles_that_nobody_kept_do_not_pile_up() -> None:
    model = small()
    for name in NAMES:
        last = apply(model, [name])
    last.undo()
    assert all(p.requires_grad for p in model.parameters())
    assert all(m.training for m in model.modules())


def test_a_new_head_and_a_new_group_are_seen() -> None:
    model = small()
    optimizer = torch.optim.SGD(model[:6].parameters(), lr=0.1)
    applied = apply(model, ["0.weight"], optimizer=optimizer)
    model[6] = nn.Linear(64, 3)
    optimizer.add_param_group({"params": model[6].parameters()})
    applied.update(["6.weight"])
    before = weights(model)
    step(model, optimizer)
    assert {n for n, p in model.named_parameters() if not torch.equal(p, before[n])} == {"6.weight"}
    applied.undo()
    assert all(p.requires_grad for p in model.parameters())


def test_a_refused_plan_changes_nothing() -> None:
    model = small()
    applied = apply(model, ["6.bias"])
    with pytest.raises(ConfigError, match=r"'nope'.*'6\.weights'"):
        applied.update(["0.weight", "nope", "6.weights"])
    assert applied.trainable == ("6.bias",)
    with pytest.raises(ConfigError, match="no parameter 'x'"):
        apply(model, ["x"])
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {"6.bias"}
    with pytest.raises(ConfigError, match="one string"):
        applied.update("6.bias")
    with pytest.raises(ConfigError, match="'thaw' is not a policy"):
        apply(model, ["6.bias"], bn="thaw")  # type: ignore[arg-type]


def test_a_tied_tensor_goes_by_any_of_its_names() -> None:
    model = Tied()
    with apply(model, ["out.weight", "embed.weight", "mid.bias"]) as applied:
        assert applied.trainable == ("embed.weight", "mid.bias")


def test_trap_1_a_tensor_that_the_optimizer_does_not_hold_is_refused() -> None:
    model = small()
    optimizer = torch.optim.SGD(model[6].parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"does not hold 0\.weight"):
        apply(model, ["0.weight", "6.bias"], optimizer=optimizer)
    apply(model, ["6.bias"], optimizer=optimizer).undo()


def test_trap_2_param_groups_are_never_edited_and_checkpoints_load_under_any_plan() -> None:
    model = small()
    optimizer = torch.optim.Adam([{"params": model[:4].parameters()}, {"params": model[4:].parameters(), "lr": 0.1}])
    groups = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    applied = apply(model, ["6.bias"], optimizer=optimizer)
    step(model, optimizer)
    saved = optimizer.state_dict()
    applied.update(["0.weight", "6.weight"])
    step(model, optimizer)
    optimizer.load_state_dict(saved)
    step(model, optimizer)
    applied.undo()
    assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == groups


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_trap_3_a_resting_tensor_does_not_decay_or_coast(kind: type[torch.optim.Optimizer]) -> None:
    model = small()
    extra = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.1, weight_decay=0.1, **extra)  # type: ignore[call-arg]
    for seed in range(3):
        step(model, optimizer, seed)  # momentum and a gradient that is not zero for everything
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    before = weights(model)
    with apply(model, ["6.bias"], optimizer=optimizer):
        optimizer.zero_grad(set_to_none=False)
        model(torch.randn(2, 3, 8, 8)).sum().backward()
        optimizer.step()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"6.bias"}


def test_copies_and_pickles_of_a_model_under_a_plan_work() -> None:
    model = small()
    applied = apply(model, ["6.bias"])
    keys = list(small().state_dict())
    clone = copy.deepcopy(model)
    clone.train()
    assert not clone[1].training  # the copy behaves as its original does
    assert clone[1].train.__self__ is clone[1]
    loaded = pickle.loads(pickle.dumps(model))
    assert list(loaded.state_dict()) == list(clone.state_dict()) == list(model.state_dict()) == keys
    loaded.train()
    assert loaded[1].training  # a plain model again
    applied.undo()
    for other in (clone, loaded):
        with apply(other, ["0.weight"]):
            other.train()
            assert not other[1].training
        assert other[1].training
        x = torch.randn(2, 3, 8, 8)
        assert torch.equal(other.eval()(x), model.eval()(x))


def test_wrapped_models_go_by_the_names_of_the_model_inside() -> None:
    model = small()
    with apply(nn.DataParallel(torch.compile(model, backend="eager")), ["6.bias"]) as applied:
        assert applied.trainable == ("6.bias",)
    assert all(p.requires_grad for p in model.parameters())


def test_a_standing_plan_does_not_keep_its_model_alive() -> None:
    model = small()
    apply(model, ["6.bias"])
    ghost = weakref.ref(model)
    del model
    gc.collect()
    assert ghost() is None
