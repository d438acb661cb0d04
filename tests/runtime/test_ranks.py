"""Trap 5: all ranks must hold the same plan, though each sees other data and another clock."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import json, os, sys
import torch, torch.distributed as dist
from loop_support import batches, chain_profile, cross_entropy, small_net
from elastictrainer.runtime.controller import Elastic
from elastictrainer.runtime.optimizers import make_optimizer
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=rank, world_size=2)
model = small_net()
optimizer = make_optimizer("sgd", model.parameters(), lr=0.05)
elastic = Elastic(model, optimizer, cross_entropy, budget="0.5x", interval=1, profile=chain_profile(model))
for epoch in range(4):
    for batch in elastic.epoch(batches(8, seed=rank)):
        cross_entropy(model, batch).backward()
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
print(json.dumps([event["id"] for event in elastic.history]), flush=True)
dist.barrier()
os._exit(0)  # gloo's threads now and then abort the interpreter while it is taken down ("terminate called")
"""


@pytest.mark.slow
def test_two_processes_hold_the_same_plans() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *sys.path]), "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(port)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [worker.communicate(timeout=120) for worker in workers]
    assert all(worker.returncode == 0 for worker in workers), said
    plans = [json.loads(out.decode().splitlines()[-1]) for out, _ in said]
    assert plans[0] == plans[1]
    assert len(plans[0]) == 4
