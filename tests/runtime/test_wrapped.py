"""`fit` on a model inside torch.compile or DataParallel: the same plans, the same weights, and compilations counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_support import batches, chain_profile, cross_entropy, small_net
from torch import nn

from elastictrainer.runtime.compilation import GRAPHS_PER_PLAN
from elastictrainer.runtime.loop import fit
from elastictrainer.runtime.optimizers import make_optimizer
from elastictrainer.runtime.result import Result

WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "parallel": nn.DataParallel,
    "both": lambda model: torch.compile(nn.DataParallel(model), backend="eager"),
}


@pytest.fixture(autouse=True)
def _compiled_code_is_forgotten() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def train(model: nn.Module, out: Path | None = None, **options: Any) -> Result:
    given: dict[str, Any] = {
        "epochs": 4, "interval": 1, "policy": "random", "budget": "0.6x", "deterministic": True,
        "val_loader": batches(2, seed=1), "profile": chain_profile(small_net()),
    }  # fmt: skip
    return fit(
        model, make_optimizer("adam", model.parameters(), lr=0.01), cross_entropy, batches(6), out=out, progress=False,
        **given | options,
    )  # fmt: skip


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrapped_it_trains_as_it_does_alone(tmp_path: Path, wrap: Callable[[nn.Module], Any]) -> None:
    alone, inner = small_net(), small_net()
    expected = train(alone)
    result = train(wrap(inner), tmp_path / "run")
    assert [plan["id"] for plan in result.plans] == [plan["id"] for plan in expected.plans]
    assert len({plan["id"] for plan in result.plans}) > 1
    assert all(torch.equal(a, b) for a, b in zip(inner.state_dict().values(), alone.state_dict().values()))
    assert expected.compilations == 0
    compiled = wrap is not nn.DataParallel
    assert (0 if compiled else -1) < result.compilations <= GRAPHS_PER_PLAN * len(result.plans) * compiled
    assert json.loads((tmp_path / "run" / "result.json").read_text())["compilations"] == result.compilations
    assert ("torch.compile built" in (tmp_path / "run" / "report.html").read_text()) is compiled


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrapped_it_is_profiled_and_planned_for(wrap: Callable[[nn.Module], Any]) -> None:
    inner = small_net()
    result = train(wrap(inner), profile=None, policy="elastic", budget="1x", deterministic=False)
    named = dict(inner.named_parameters())
    assert result.plans
    assert result.measured_ratio is not None
    assert result.full_step_s is not None
    assert all(p.requires_grad for p in named.values())
