"""A probe leaves everything bit-identical, for each optimizer and each importance."""

from __future__ import annotations

import pytest
import torch
from importance_support import DEVICES, OPTIMIZERS, batches, loss_fn, same, snapshot, trained
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elastictrainer.errors import TrainingError
from elastictrainer.importance import IMPORTANCES, elastic

CASES = [("elastic", optimizer) for optimizer in OPTIMIZERS]
CASES += [(importance, "adam") for importance in IMPORTANCES if importance != "elastic"]


@pytest.mark.parametrize(("importance", "name"), CASES)
@pytest.mark.parametrize("steps", [0, 3], ids=["fresh", "running"])
@pytest.mark.parametrize("device", DEVICES)
def test_bit_identical(importance: str, name: str, steps: int, device: str) -> None:
    model, optimizer = trained(OPTIMIZERS[name], steps=steps, resting=("conv.weight", "norm.bias"), device=device)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    model.norm.eval()
    before = snapshot(model, optimizer, scheduler)
    score, data = IMPORTANCES[importance].fn, batches(2, device=device)
    score(model, optimizer, loss_fn, data, gradient_batches=batches(1, seed=5, device=device))
    score(model, optimizer, loss_fn, data)
    after = snapshot(model, optimizer, scheduler)
    for part, (was, now) in enumerate(zip(before, after)):
        assert same(was, now), f"part {part} of the snapshot moved"


@pytest.mark.parametrize("name", ["sgd_fused", "adamw", "custom"])
def test_training_goes_on_as_if_nothing_had_been(name: str) -> None:
    def train(probe: bool) -> list[bytes]:
        model, optimizer = trained(OPTIMIZERS[name])
        for batch in batches(3, seed=7):
            if probe:
                elastic(model, optimizer, loss_fn, batches(2, seed=8))
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
        return [value.numpy().tobytes() for value in model.state_dict().values()]

    assert train(probe=True) == train(probe=False)


def test_no_trace_of_a_probe_that_failed() -> None:
    model, optimizer = trained(OPTIMIZERS["adam"])
    x, y = batches(1)[0]
    before = snapshot(model, optimizer)
    with pytest.raises(TrainingError, match=r"batches\[1\] is nan"):
        elastic(model, optimizer, loss_fn, [(x, y), (x * float("nan"), y)])
    assert same(before, snapshot(model, optimizer))


def test_hooks_stay_silent() -> None:
    """Neither hooks on the optimizer, nor on all optimizers, nor those that step within backward see a probe."""
    model, optimizer = trained(OPTIMIZERS["sgd"])
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    everywhere = register_optimizer_step_pre_hook(lambda *_: calls.append("global"))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    try:
        elastic(model, optimizer, loss_fn, batches(2))
    finally:
        everywhere.remove()
    assert calls == []


def test_inside_no_grad_and_inference_mode() -> None:
    """Evaluation code may call for a probe."""
    model, optimizer = trained(OPTIMIZERS["adam"])
    model.eval()
    data = batches(2)
    expected = elastic(model, optimizer, loss_fn, data)
    with torch.no_grad():
        assert elastic(model, optimizer, loss_fn, data) == expected
    with torch.inference_mode():
        assert elastic(model, optimizer, loss_fn, data) == expected


def test_a_compiled_model_is_probed_by_its_own_names() -> None:
    model, optimizer = trained(OPTIMIZERS["sgd"])
    model.eval()
    compiled = torch.compile(
        model, backend="eager"
    )  # never called: a probe runs the module inside, and so compiles nothing
    assert elastic(compiled, optimizer, loss_fn, batches(1)) == elastic(model, optimizer, loss_fn, batches(1))


def test_a_distributed_model_goes_on_reducing_after_a_probe() -> None:
    """A probe inside DistributedDataParallel's forward would leave its reducer waiting for a backward pass."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model, optimizer = trained(OPTIMIZERS["sgd"])
        model.eval()
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        expected = elastic(model, optimizer, loss_fn, batches(1))
        for batch in batches(2, seed=3):
            loss_fn(wrapped, batch).backward()
            assert elastic(wrapped, optimizer, loss_fn, batches(1)) == expected
        loss_fn(wrapped, batches(1)[0]).backward()
    finally:
        torch.distributed.destroy_process_group()


def test_the_gradient_scaler_is_only_read() -> None:
    model, optimizer = trained(OPTIMIZERS["sgd"])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = dict(vars(scaler))
    elastic(model, optimizer, loss_fn, batches(1), scaler=scaler)
    assert same(list(before.items()), list(vars(scaler).items()))
