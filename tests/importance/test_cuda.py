"""What only a GPU can show: capturable state, offloaded state, half precision with a live gradient scaler."""

from __future__ import annotations

import pytest
import torch
from importance_support import OPTIMIZERS, batches, loss_fn, same, snapshot, trained
from torch import Tensor, nn

from elastictrainer.importance import elastic
from elastictrainer.runtime.apply import apply

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
RESTING = ("conv.weight", "twice.weight")


@pytest.mark.parametrize("kind", ["adam", "adamw_foreach", "adamw_fused", "sgd_fused", "nadam", "capturable"])
def test_state_that_was_offloaded_counts_as_if_kept(kind: str) -> None:
    make = OPTIMIZERS.get(kind, lambda p: torch.optim.Adam(p, lr=0.01, capturable=True))
    model, optimizer = trained(make, device="cuda")
    model.eval()
    data = batches(2, device="cuda")
    expected = elastic(model, optimizer, loss_fn, data)
    active = [n for n, _ in model.named_parameters() if n not in RESTING]
    with apply(model, active, optimizer=optimizer, resting_state="offload") as applied:
        assert applied.state_bytes()["offloaded"] > 0
        before = snapshot(model, optimizer)
        assert elastic(model, optimizer, loss_fn, data) == pytest.approx(expected, rel=1e-4, abs=1e-9)
        assert same(before, snapshot(model, optimizer))


def test_half_precision_with_a_live_scaler() -> None:
    model, optimizer = trained(OPTIMIZERS["adamw_fused"], device="cuda")
    model.eval()
    scaler = torch.amp.GradScaler("cuda")

    def mixed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cuda", dtype=torch.float16):
            return loss_fn(model, batch)

    optimizer.zero_grad()
    data = batches(2, device="cuda")
    scaler.scale(mixed(model, data[0])).backward()
    scaler.step(optimizer)
    scaler.update()
    before = scaler.state_dict()
    scores = elastic(model, optimizer, mixed, data, scaler=scaler)
    assert scaler.state_dict() == before
    assert scores == pytest.approx(elastic(model, optimizer, loss_fn, data), rel=0.1, abs=1e-4)
