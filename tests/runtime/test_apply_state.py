"""The optimizer under plans that change: state at rest, and fused and foreach steps over tensors that have none yet."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from elastictrainer.errors import ConfigError
from elastictrainer.runtime.apply import apply

PLANS = [("0.weight",), ("0.weight", "2.bias"), ("2.weight", "2.bias"), ("0.bias", "0.weight", "2.weight", "2.bias")]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def backward(model: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    loss: torch.Tensor = model(x.to(next(model.parameters()).device)).square().mean()
    loss.backward()
    return loss


def train(model: nn.Module, optimizer: Optimizer) -> None:
    applied = apply(model, PLANS[0], optimizer=optimizer)
    for seed, plan in enumerate(PLANS):
        applied.update(plan)
        for repeat in range(2):
            optimizer.zero_grad()
            backward(model, 2 * seed + repeat)
            optimizer.step()
    applied.undo()


OPTIMIZERS: list[tuple[Callable[..., Optimizer], dict[str, Any]]] = [
    (SGD, {"momentum": 0.9}),
    (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "maximize": True}),
    (SGD, {}),
    (Adam, {}),
    (Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (AdamW, {}),
    (RMSprop, {"momentum": 0.9}),
    (Adagrad, {}),
]


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_trap_14_tensors_with_and_without_state_step_together(
    kind: Callable[..., Optimizer], options: dict[str, Any], implementation: str
) -> None:
    if kind is RMSprop and implementation == "fused":
        pytest.skip("torch has no fused RMSprop")
    model, oracle = net(), net()
    train(model, kind(model.parameters(), lr=0.1, **options, **{implementation: True}))
    train(oracle, kind(oracle.parameters(), lr=0.1, **options, foreach=False))
    for name, value in model.named_parameters():
        torch.testing.assert_close(value, oracle.get_parameter(name), rtol=1e-6, atol=1e-6)


class Forwarding(Optimizer):
    """As accelerate wraps: an Optimizer by type that was never initialised as one, so it has no hooks of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


@pytest.mark.parametrize("resting", ["keep", "drop"])
def test_a_fused_optimizer_inside_a_frameworks_wrapper(resting: Any) -> None:
    def made(wrap: Callable[[Optimizer], Optimizer], *, fused: bool) -> nn.Module:
        model = net()
        optimizer = wrap(SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused))
        with apply(model, PLANS[0], optimizer=optimizer, resting_state=resting) as applied:
            for seed, plan in enumerate(PLANS):
                applied.update(plan)
                optimizer.zero_grad()
                backward(model, seed)
                optimizer.step()
        return model

    wrapped, oracle = made(Forwarding, fused=True), made(lambda optimizer: optimizer, fused=False)
    for name, value in wrapped.named_parameters():
        torch.testing.assert_close(value, oracle.get_parameter(name), rtol=1e-6, atol=1e-6)


def test_trap_14_is_real_on_this_torch() -> None:
    """The day this fails, runtime/fused.py can go."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    model[0].requires_grad_(False)
    backward(model, 0)
    optimizer.step()
    model[0].requires_grad_(True)
    backward(model, 1)
    with pytest.raises(TypeError):
        optimizer.step()


@pytest.mark.parametrize("dampening", [0.0, 0.3])
def test_fused_sgd_starts_tensors_inside_a_closure_too(dampening: float) -> None:
    results = []
    for fused in (True, False):
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=dampening, fused=fused)
        calls: list[int] = []
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        applied = apply(model, PLANS[0], optimizer=optimizer)
        for seed, plan in enumerate(PLANS):
            applied.update(plan)
            optimizer.zero_grad()
            loss = optimizer.step(lambda model=model, seed=seed: backward(model, seed))  # type: ignore[misc]
            assert loss is not None
            assert {n for n, p in model.named_parameters() if p.grad is not None} == set(plan)
        assert len(calls) == len(PLANS)
        applied.undo()
        assert optimizer.param_groups[0]["dampening"] == dampening
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


def test_fused_sgd_that_overflows_on_a_first_step_starts_from_nothing() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with apply(model, ["2.bias"], optimizer=optimizer):
        scaler.scale(model(torch.full((2, 4), 1.0)).sum() * float("inf")).backward()
        before = model[2].bias.detach().clone()
        scaler.step(optimizer)
        assert torch.equal(model[2].bias, before)
        assert not optimizer.state[model[2].bias]["momentum_buffer"].any()


def state_of(optimizer: Optimizer) -> dict[str, Any]:
    return copy.deepcopy(optimizer.state_dict()["state"])


def test_keep_keeps_and_counts_bytes() -> None:
    model = net()
    optimizer = Adam(model.parameters())
    backward(model, 0)
    optimizer.step()
    before = state_of(optimizer)
    with apply(model, ["2.bias"], optimizer=optimizer) as applied:
        resting = [p for n, p in model.named_parameters() if n != "2.bias"]
        expected = sum(t.numel() * t.element_size() for p in resting for t in optimizer.state[p].values())
        assert applied.state_bytes() == {"kept": expected, "dropped": 0, "offloaded": 0}
        torch.testing.assert_close(state_of(optimizer), before, rtol=0, atol=0)
    assert applied.state_bytes() == {"kept": 0, "dropped": 0, "offloaded": 0}


def test_drop_frees_and_a_woken_tensor_starts_afresh() -> None:
    model = net()
    optimizer = Adam(model.parameters())
    backward(model, 0)
    optimizer.step()
    held = {
        n: sum(t.numel() * t.element_size() for t in optimizer.state[p].values()) for n, p in model.named_parameters()
    }
    with apply(model, ["2.bias"], optimizer=optimizer, resting_state="drop") as applied:
        assert set(optimizer.state) == {model[2].bias}
        dropped = sum(held.values()) - held["2.bias"]
        assert applied.state_bytes() == {"kept": 0, "dropped": dropped, "offloaded": 0}
        applied.update(["2.bias", "0.weight"])
        assert applied.state_bytes()["dropped"] == dropped - held["0.weight"]
        optimizer.zero_grad()
        backward(model, 1)
        optimizer.step()
        assert optimizer.state[model[0].weight]["step"] == 1
        assert optimizer.state[model[2].bias]["step"] == 2


def test_offload_on_a_cpu_model_is_keep() -> None:
    model = net()
    optimizer = Adam(model.parameters())
    backward(model, 0)
    optimizer.step()
    with apply(model, ["2.bias"], optimizer=optimizer, resting_state="offload") as applied:
        bytes_now = applied.state_bytes()
        assert bytes_now["offloaded"] == bytes_now["dropped"] == 0
        assert bytes_now["kept"] > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("fused", [False, True])
def test_offload_goes_to_host_memory_and_comes_back(fused: bool) -> None:
    results = []
    for resting_state in ("keep", "offload"):
        model = net().cuda()
        optimizer = Adam(model.parameters(), fused=fused)
        applied = apply(model, PLANS[0], optimizer=optimizer, resting_state=resting_state)  # type: ignore[arg-type]
        homes: dict[tuple[str, str], torch.device] = {}
        for seed, plan in enumerate((*PLANS, *PLANS)):
            applied.update(plan)
            applied.update(plan)  # again: nothing left to move
            for name, param in model.named_parameters():
                for key, value in optimizer.state.get(param, {}).items():
                    away = resting_state == "offload" and name not in plan
                    assert value.device.type == "cpu" if away else value.device == homes[name, key]
            optimizer.zero_grad()
            backward(model, seed)
            optimizer.step()
            for name in plan:
                state = optimizer.state[model.get_parameter(name)]
                homes.update({(name, key): value.device for key, value in state.items()})
        applied.update(["2.bias"])
        total = sum(t.numel() * t.element_size() for p in model.parameters() for t in optimizer.state[p].values())
        own = sum(t.numel() * t.element_size() for t in optimizer.state[model[2].bias].values())
        bytes_now = applied.state_bytes()
        assert sum(bytes_now.values()) == total - own
        assert (bytes_now["offloaded"] > 0) == (resting_state == "offload")
        applied.undo()
        for name, param in model.named_parameters():
            assert all(value.device == homes[name, key] for key, value in optimizer.state[param].items())
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*results)


def test_a_wrong_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="'forget' is not a policy"):
        apply(net(), ["2.bias"], resting_state="forget")  # type: ignore[arg-type]
