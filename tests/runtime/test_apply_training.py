"""A changing plan under everything that people's loops do: each against plain PyTorch with the same flags."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint

from elastictrainer.errors import ModelError
from elastictrainer.runtime.apply import apply

PLANS: list[Sequence[str]] = [
    ("a.3.weight", "b.3.weight", "c.bias"),
    ("c.weight", "c.bias"),
    ("a.0.weight", "a.1.bias", "c.bias"),
    ("b.0.weight", "b.1.weight", "c.weight"),
]


class Net(nn.Module):
    """Two stages and a head; `wrap` is how a stage is called, so that it can be a checkpoint."""

    def __init__(self, wrap: Callable[[nn.Module, Tensor], Tensor] = lambda stage, x: stage(x)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = self._stage(3), self._stage(8)
        self.c = nn.Linear(8, 4)
        self.wrap = wrap

    @staticmethod
    def _stage(channels: int) -> nn.Sequential:
        first, second = nn.Conv2d(channels, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        return nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), second, nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.wrap(self.a, x)
        return self.c(self.wrap(self.b, x).mean((2, 3)))


def batch(seed: int, size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(4, (size,), generator=generator)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    x, y = batch(seed)
    return nn.functional.cross_entropy(model(x), y)


def by_hand(model: nn.Module, plan: Sequence[str]) -> None:
    """What apply should come to, in plain PyTorch."""
    model.train()
    for name, param in model.named_parameters():
        param.requires_grad_(name in plan)
        if name not in plan:
            param.grad = None
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


Step = Callable[[nn.Module, Optimizer, int], None]


def plain_step(model: nn.Module, optimizer: Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    loss_of(model, seed).backward()
    optimizer.step()


def same_as_by_hand(step: Step, model: nn.Module | None = None, oracle: nn.Module | None = None) -> nn.Module:
    """Train one model through `apply` and its twin by hand, over plans that change; both must end bit-equal."""
    model, oracle = model or Net(), oracle or Net()
    mine, theirs = (SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01) for m in (model, oracle))
    applied = apply(model, PLANS[0], optimizer=mine)
    for seed, plan in enumerate(PLANS):
        applied.update(plan)
        model.train()
        by_hand(oracle, plan)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        step(model, mine, seed)
        step(oracle, theirs, seed)
        assert {n for n, p in model.named_parameters() if not torch.equal(p, before[n])} == set(plan)
    applied.undo()
    for (name, value), other in zip(model.state_dict().items(), oracle.state_dict().values()):
        assert torch.equal(value, other), name
    return model


def test_plain_training() -> None:
    same_as_by_hand(plain_step)


def test_non_reentrant_checkpointing() -> None:
    same_as_by_hand(plain_step, Net(lambda stage, x: checkpoint(stage, x, use_reentrant=False)))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_trap_8_re_entrant_checkpointing_behind_a_frozen_start_is_refused() -> None:
    model = Net(lambda stage, x: checkpoint(stage, x, use_reentrant=True))
    with apply(model, ["b.0.weight", "c.bias"]):
        with pytest.raises(ModelError, match=r"b\.0\.weight .*use_reentrant=False"):
            loss_of(model, 0)
        model.eval()
        with torch.no_grad():
            loss_of(model, 0)  # no gradient is wanted here: nothing to refuse
    model = Net(lambda stage, x: checkpoint(stage, x, use_reentrant=True) if x.requires_grad else stage(x))
    with apply(model, ["a.0.weight", "b.0.weight"]):
        loss_of(model, 0).backward()  # its input requires a gradient: this works
        assert model.b[0].weight.grad is not None


def test_the_check_for_checkpoints_leaves_no_hook_behind() -> None:
    model = Net()
    with apply(model, PLANS[0]) as applied:
        loss_of(model, 0).backward()
        assert not any(m._forward_pre_hooks for m in model.modules())
        applied.update(PLANS[1])
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_gradient_accumulation() -> None:
    def step(model: nn.Module, optimizer: Optimizer, seed: int) -> None:
        optimizer.zero_grad()
        for part in range(3):
            (loss_of(model, 10 * seed + part) / 3).backward()
        optimizer.step()

    same_as_by_hand(step)


def test_a_new_plan_in_the_middle_of_accumulation() -> None:
    model, oracle = Net(), Net()
    by_hand(oracle, [name for name, _ in oracle.named_parameters()])
    parts = []
    for seed in (0, 1):
        oracle.zero_grad()
        loss_of(oracle, seed).backward()
        parts.append({name: p.grad.clone() for name, p in oracle.named_parameters() if p.grad is not None})
    with apply(model, ["b.0.weight", "c.weight"]) as applied:
        loss_of(model, 0).backward()
        applied.update(["c.weight", "a.0.weight"])
        loss_of(model, 1).backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert set(grads) == {"c.weight", "a.0.weight"}  # what went to rest has no gradient left to step with
    torch.testing.assert_close(grads["c.weight"], parts[0]["c.weight"] + parts[1]["c.weight"])
    torch.testing.assert_close(grads["a.0.weight"], parts[1]["a.0.weight"])


def test_clipping_is_over_the_active_set() -> None:
    def step(model: nn.Module, optimizer: Optimizer, seed: int) -> None:
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        active = [p.grad.norm() for p in model.parameters() if p.requires_grad and p.grad is not None]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        torch.testing.assert_close(norm, torch.stack(active).norm())
        assert norm > 0.01
        optimizer.step()

    same_as_by_hand(step)


def test_gradient_scaling() -> None:
    scalers: dict[int, torch.amp.GradScaler] = {}

    def step(model: nn.Module, optimizer: Optimizer, seed: int) -> None:
        scaler = scalers.setdefault(id(model), torch.amp.GradScaler("cpu", init_scale=64.0))
        optimizer.zero_grad()
        scaler.scale(loss_of(model, seed)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    same_as_by_hand(step)


def test_bf16_autocast() -> None:
    def step(model: nn.Module, optimizer: Optimizer, seed: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, seed)
        loss.backward()
        optimizer.step()

    same_as_by_hand(step)


def test_channels_last() -> None:
    model, oracle = (Net().to(memory_format=torch.channels_last) for _ in range(2))
    same_as_by_hand(plain_step, model, oracle)


def test_a_copy_trains_like_its_original() -> None:
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    apply(model, PLANS[0], optimizer=optimizer)
    clone = copy.deepcopy(model)
    plain_step(model, optimizer, 0)
    plain_step(clone, SGD(clone.parameters(), lr=0.1), 0)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), clone.state_dict().values()))


def most_compilations(count: int) -> AbstractContextManager[object]:
    """torch.compile gives up after so many, by the name that this torch has for it."""
    name = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
    return torch._dynamo.config.patch({name: count})


class Tiny(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 4))


@pytest.mark.parametrize("door", ["torch.compile", "module.compile"])
def test_trap_4_compiled_code_moves_the_right_tensors_after_every_re_plan(door: str) -> None:
    torch.compiler.reset()
    model, oracle = Tiny(), Tiny()
    if door == "torch.compile":
        compiled: nn.Module = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
    else:
        model.compile(backend="aot_eager")
        compiled = model
    mine, theirs = (SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, oracle))
    plans = [
        ["0.weight", "3.bias"],
        ["3.weight"],
        ["0.bias", "1.weight"],
        ["1.bias", "3.weight"],
        ["0.weight", "3.bias"],
    ]
    with most_compilations(3), apply(compiled, plans[0], optimizer=mine) as applied:
        for seed, plan in enumerate(plans):
            applied.update(plan)
            compiled.train()
            by_hand(oracle, plan)
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            for _ in range(2):
                plain_step(compiled, mine, seed)
                plain_step(oracle, theirs, seed)
            assert {n for n, p in model.named_parameters() if not torch.equal(p, before[n])} == set(plan)
            assert applied.compilations() == seed + 1  # one a plan; and torch.compile never gave up, as it would at 3
    torch.testing.assert_close(model.state_dict(), oracle.state_dict(), rtol=1e-5, atol=1e-6)
    torch.compiler.reset()


def test_trap_4_a_plan_seen_a_moment_ago_has_its_code_still() -> None:
    torch.compiler.reset()
    model = Tiny()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = SGD(model.parameters(), lr=0.1)
    with apply(model, ["3.weight"], optimizer=optimizer) as applied:
        for plan in (["3.weight"], ["0.bias"], ["3.weight"], ["0.bias"]):
            applied.update(plan)
            plain_step(compiled, optimizer, 0)  # type: ignore[arg-type]
        assert applied.compilations() == 2
    torch.compiler.reset()
