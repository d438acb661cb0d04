"""Trains in a process of its own, to be killed from outside: python resume_worker.py FOLDER OPTIMIZER RESTING."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from loop_support import WIDTH, batches, chain_profile, cross_entropy, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from elastictrainer.runtime.loop import fit
from elastictrainer.runtime.optimizers import make_optimizer

EPOCHS = 4


def loader() -> DataLoader[Any]:
    inputs, labels = zip(*batches(15))
    data = TensorDataset(torch.cat(inputs), torch.cat(labels))
    return DataLoader(data, batch_size=6, shuffle=True)


def train(
    folder: str | None, optimizer: str, resting: Any = "keep", *, loss_fn: Any = cross_entropy, **options: Any
) -> nn.Module:
    """All that a resumed run could get wrong: dropout, shuffling, norms, changing plans, a schedule, accumulation."""
    model = small_net(dropout=0.2)
    fit(
        model,
        make_optimizer(optimizer, model.parameters(), lr=0.05, weight_decay=0.01),
        loss_fn,
        loader(),
        epochs=EPOCHS,
        budget="0.6x",
        policy="elastic",
        interval="7steps",
        probe_batches=2,
        accumulate=2,
        clip=1.0,
        bn="track",
        resting_state=resting,
        profile=chain_profile(model),
        out=folder,
        resume=folder is not None,
        checkpoint_every=0.0,
        deterministic=True,
        progress=False,
        **options,
    )
    return model


if __name__ == "__main__":
    assert WIDTH
    torch.set_num_threads(1)

    def slow_loss(model: nn.Module, batch: Any) -> Tensor:
        time.sleep(0.002)  # so that a kill finds it anywhere, not only in the writing
        return cross_entropy(model, batch)

    train(sys.argv[1], sys.argv[2], sys.argv[3], loss_fn=slow_loss)
