"""SparseUpdate's search: brute force on a network small enough for it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from elastictrainer.budget import parse_bytes
from elastictrainer.errors import BudgetError
from elastictrainer.fewshot.methods import Ceilings
from elastictrainer.fewshot.search import SHARES, evolve
from elastictrainer.importance.potential import channel_norms
from elastictrainer.profiling.layers import price_backward


def test_the_search_finds_the_best_scheme_there_is() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16, 4))
    prices = price_backward(model, lambda m, x: m(x).square().mean(), torch.randn(2, 3, 8, 8))
    norms = channel_norms(model, [layer.weight for layer in prices.layers])
    for seed in range(5):
        rng = np.random.default_rng(seed)
        gains = {(x.weight, s): float(rng.normal(0.02, 0.02) * s**0.5) for x in prices.layers for s in SHARES}
        for memory, compute in (("2KiB", "60%"), ("6KiB", "40%"), ("20KiB", "90%")):
            ceilings = Ceilings(memory, compute)
            best = 0.0
            for row in itertools.product((None, *SHARES), repeat=len(prices.layers)):
                taken = [(x, s) for x, s in zip(prices.layers, row) if s is not None and gains[x.weight, s] > 0]
                channels = {
                    name: tuple(sorted(np.argsort(-np.asarray(norms[x.weight]))[: round(s * x.channels)].tolist()))
                    for x, s in taken
                    if s < 1
                    for name in x.tensors
                }
                spent = prices.spent([name for x, _ in taken for name in x.tensors], channels)
                if spent.nbytes <= parse_bytes(memory) and spent.macs <= float(compute[:-1]) / 100 * prices.full.macs:
                    best = max(best, sum(gains[x.weight, s] for x, s in taken))
            if best == 0.0:
                with pytest.raises(BudgetError, match="raise them"):
                    evolve(prices, gains, norms=norms, ceilings=ceilings)
                continue
            plan = evolve(prices, gains, norms=norms, ceilings=ceilings, seed=seed)
            assert plan.backward is not None
            assert plan.backward.nbytes <= parse_bytes(memory)
            found = sum(
                gains[x.weight, 1.0 if x.weight not in plan.channels else SHARES[0]]
                for x in prices.layers
                if x.weight in plan.trainable
            )
            assert found == pytest.approx(best)
            assert plan.id == evolve(prices, gains, norms=norms, ceilings=ceilings, seed=seed).id
