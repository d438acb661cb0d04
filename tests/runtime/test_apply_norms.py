"""Running statistics under each policy, through `model.train()` and re-plans."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastictrainer.errors import ConfigError
from elastictrainer.runtime.apply import apply


class Fancy(nn.BatchNorm2d):
    """A subclass with a forward of its own, as timm's BatchNormAct2d is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        Fancy(4),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        nn.SyncBatchNorm(4),
        nn.Conv2d(4, 2, 1),
    )


TRACKING = (1, 2, 3, 4)


def stats(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


def moved(model: nn.Sequential) -> set[int]:
    """Which layers' statistics one forward pass in training mode moves (SyncBatchNorm trains on GPUs only)."""
    before = stats(model)
    model.train()
    x = torch.randn(4, 3, 8, 8)
    for module in model:
        x = module.eval()(x) if isinstance(module, nn.SyncBatchNorm) and module.training else module(x)
    return {int(n.split(".")[0]) for n, v in model.named_buffers() if not torch.equal(v, before[n])}


def test_trap_6_statistics_stay_frozen_through_every_train_call() -> None:
    model = net()
    with apply(model, ["1.weight", "5.weight"]):
        for _ in range(2):
            assert moved(model) == set()
            assert not any(model[i].training for i in TRACKING)
            assert model[0].training
            model.eval()
    assert not any(module.training for module in model.modules())  # the last wish was eval()
    model.train()
    assert moved(model) == {1, 2, 3}


def test_undo_gives_back_the_mode_that_was_last_asked_for() -> None:
    model = net()
    model[1].eval()
    applied = apply(model, ["5.weight"])
    applied.update(["5.bias"])
    applied.undo()
    assert [model[i].training for i in TRACKING] == [False, True, True, True]
    model.eval()
    with apply(model, ["5.weight"]):
        model.train()
        assert not model[2].training
    assert all(m.training for m in model.modules())


def test_track_is_what_torch_does() -> None:
    model = net()
    with apply(model, ["5.weight"], bn="track"):
        assert moved(model) == {1, 2, 3}


def test_with_owner_follows_the_plan() -> None:
    model = net()
    with apply(model, ["1.bias"], bn="with_owner") as applied:
        assert moved(model) == {1}
        applied.update(["2.weight", "3.bias", "0.weight"])
        assert moved(model) == {2, 3}
        applied.update(["5.weight"])
        assert moved(model) == set()
    assert moved(model) == {1, 2, 3}


def test_frozen_is_evaluation_mode_exactly() -> None:
    model, twin = net(), net().eval()
    x = torch.randn(4, 3, 8, 8)
    with apply(model, ["5.weight"]):
        model.train()
        assert torch.equal(model(x), twin(x))


def test_a_layer_without_statistics_is_left_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.GroupNorm(1, 3), nn.LayerNorm(3))
    with apply(model, []):
        assert all(m.training for m in model.modules())


def test_a_train_method_replaced_by_others_is_an_error_not_a_silent_no_op() -> None:
    model = net()
    model[1].train = lambda mode=True: model[1]  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="BatchNorm2d"):
        apply(model, ["5.weight"])
    assert all(p.requires_grad for p in model.parameters())
    assert model[2].training
