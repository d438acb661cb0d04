"""What a standing plan holds for backward, against plain `requires_grad` flags and against training everything.

    python benchmarks/apply_memory.py --models resnet18 resnet50 mobilenet_v2 --batch-size 8 --image-size 64
    python benchmarks/apply_memory.py --device cuda --batch-size 64 --image-size 224

Plans: the last third of the tensors, a random third, all biases, and the first tensor; each with the head. Ways:
`full` trains everything; `flags` sets `requires_grad` and evaluates batch norm, in plain PyTorch; `apply` is this
library. Bytes held are counted after the forward pass, block by block; on CUDA the peak of a whole step (parameters,
momentum and workspace in it) stands beside them.

Writes results/apply_memory_*.csv and prints it.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import elastictrainer as et
from elastictrainer.metrics.held import held_bytes
from elastictrainer.runtime.norms import tracks_statistics

sys.path.insert(0, str(Path(__file__).parent))
from common import RESULTS, print_table, where, write_csv


def plans(model: nn.Module, rng: Random) -> dict[str, list[str]]:
    names = [name for name, _ in model.named_parameters()]
    head = names[-2:]
    drawn = [name for name in names if rng.random() < 1 / 3]
    return {
        "last_third": names[-(len(names) // 3) :],
        "random_third": list(dict.fromkeys([*drawn, *head])),
        "biases": list(dict.fromkeys([*(name for name in names if name.endswith("bias")), *head])),
        "first": [names[0], *head],
    }


def flags_only(model: nn.Module, names: list[str]) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(name in names)
    for module in model.modules():
        if tracks_statistics(module):
            module.eval()


def measure(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], device: str) -> dict[str, Any]:
    def forward() -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    row: dict[str, Any] = {"held_bytes": held_bytes(forward, model)}
    if device != "cpu":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

        def step() -> None:
            optimizer.zero_grad()
            forward().backward()
            optimizer.step()

        step()  # makes the momentum
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    return row


def rows_of(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    import torchvision

    torch.manual_seed(args.seed)
    base = torchvision.models.get_model(name, num_classes=200)
    batch = (
        torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=args.device),
        torch.randint(0, 200, (args.batch_size,), device=args.device),
    )
    common = {"model": name, "batch_size": args.batch_size, "image_size": args.image_size, "seed": args.seed}
    rows = []

    def run(plan: str, way: str, prepare: Callable[[nn.Module], Any]) -> None:
        model = copy.deepcopy(base).to(args.device).train()
        keep = prepare(model)
        rows.append({**common, "plan": plan, "way": way, **measure(model, batch, args.device)})
        del keep

    everything = [n for n, _ in base.named_parameters()]
    run("everything", "full", lambda model: flags_only(model, everything))
    for plan, names in plans(base, Random(args.seed)).items():
        run(plan, "flags", lambda model, names=names: flags_only(model, names))
        run(plan, "apply", lambda model, names=names: et.apply(model, names))
    for row in rows:
        for key in ("held_bytes", "peak_bytes"):
            if key in row:
                row[f"{key.removesuffix('_bytes')}_of_full"] = row[key] / rows[0][key]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet18", "resnet50", "mobilenet_v2"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = [{**row, **where(args.device)} for name in args.models for row in rows_of(name, args)]
    write_csv(args.out / f"apply_memory_{args.device}_b{args.batch_size}_{args.image_size}px.csv", rows)
    figures = ["held_of_full"] + (["peak_of_full"] if args.device != "cpu" else [])
    print_table(rows, ["model", "plan", "way", "held_bytes", *figures])


if __name__ == "__main__":
    main()
