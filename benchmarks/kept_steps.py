"""What a step costs where the forward pass of what rests is not paid again: kept features beside full steps.

    python benchmarks/kept_steps.py --threads 2 --image-size 96
    python benchmarks/kept_steps.py --device cuda --image-size 224

For each model and depth (the output layer alone; then everything above so many of the network's places where features
can be kept, nearest the loss first) real steps on kept features, and full steps, in turns in one process: data loading,
backward, optimizer and all. Beside the time, what is kept and what a step holds; and how far each way of keeping moves
the loss and the gradient from those of the whole network on the same views.

Writes results/kept_steps_*.csv (a row a model, depth and way of keeping); prints it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import elastictrainer as et
from elastictrainer.runtime.keeper import Keeper
from elastictrainer.runtime.standin import evaluating

sys.path.insert(0, str(Path(__file__).parent))
from common import RESULTS, folder_or_none, print_table, where, write_csv
from elastic import sgd
from workloads import images, loss_fn, network

WAYS = ("float32", "float16", "bfloat16", "int8")
SHARES = (0.0, 0.1, 0.25, 0.5)  # of the tensors, output side first; 0 is the output layer alone


def again(keeper: Keeper, epoch: int, fill: bool) -> Iterator[Any]:
    """Kept batches without end, of views that are there."""
    while True:
        if fill:
            keeper.fill(epoch)
        order = keeper.loader.order(epoch)
        yield from keeper.batches(order[keeper.kept_of(order, epoch)], epoch)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def timed(run: Any, steps: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)])


def off(keeper: Keeper, model: nn.Module) -> tuple[float, float]:
    """How far loss and gradient on kept features are from the whole network's on the same views, without dropout."""
    order = keeper.loader.order(0)
    order = order[keeper.kept_of(order, 0)]
    losses, gradients = [], []
    seen = keeper.loader.look(order, 0, views=keeper.views)
    with evaluating(model):
        for kept, pixels in islice(zip(keeper.batches(order, 0), seen), 4):
            one, other = keeper.loss_fn(model, kept), loss_fn(model, pixels)
            a, b = gradient(model, one), gradient(model, other)
            losses.append(abs(one.item() / other.item() - 1))
            gradients.append((torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b)).item())
    return statistics.mean(losses), statistics.mean(gradients)


def rows_of(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    device = torch.device(args.device)
    shape = network(name, classes=2, weights=args.weights, image_size=args.image_size)
    data = images(
        args.data, shape, batch_size=args.batch_size, image_size=args.image_size, device=device, cache=args.cache
    )
    torch.manual_seed(0)
    loaded = network(name, classes=data.num_classes, weights=args.weights, image_size=args.image_size)
    model = loaded.model.to(device).train()
    optimizer = sgd(model, 0.0)  # the same work, and no gradient that has been trained away
    profile = et.profile(model, loss_fn, next(iter(data.train)), optimizer=optimizer, effort=30)
    rows = []
    for share in SHARES:
        names = profile.names[: round(share * len(profile.names))] or tuple(profile.graph.head)
        with et.apply(model, names) as applied:
            for way in WAYS if share == SHARES[1] else WAYS[1:2]:
                keeper = Keeper(model, loss_fn, data.train, dtype=way, memory_bytes=args.keep_bytes)
                keeper.stand(next(iter(data.train)))
                facts = {
                    "model": name, "share": share, "tensors": len(names), "kept_as": way, "batch": args.batch_size,
                    "image": args.image_size, "seed": 0,
                }  # fmt: skip
                if not keeper.active:
                    rows.append(facts | {"obstacle": keeper.obstacle})
                    continue
                start = time.perf_counter()
                made = keeper.fill(0, groups=args.groups)
                fill_s = (time.perf_counter() - start) / made
                loss_off, gradient_off = off(keeper, model)
                kept, pixels = again(keeper, 0, False), iter(data.train)

                def on_kept(keeper: Keeper = keeper, kept: Any = kept) -> None:
                    step(model, optimizer, keeper.loss_fn(model, next(kept)))

                def on_pixels(pixels: Any = pixels) -> None:
                    step(model, optimizer, loss_fn(model, next(pixels)))

                seconds: dict[str, list[float]] = {"kept": [], "plan": [], "full": []}
                timed(on_kept, 2, device)
                for _ in range(args.rounds):
                    seconds["kept"].append(timed(on_kept, args.steps, device))
                    seconds["plan"].append(timed(on_pixels, max(1, args.steps // 4), device))
                    applied.update(profile.names)
                    seconds["full"].append(timed(on_pixels, max(1, args.steps // 4), device))
                    applied.update(names)
                full, plan, on = (statistics.median(seconds[k]) for k in ("full", "plan", "kept"))
                rows.append(
                    facts
                    | {
                        "full_step_s": full, "plan_step_s": plan, "kept_step_s": on, "speedup": full / on,
                        "spread": statistics.stdev(a / b for a, b in zip(seconds["full"], seconds["kept"])),
                        "fill_image_s": fill_s, "fill_of_forward": fill_s * args.batch_size / profile.forward_s,
                        "kept_bytes": keeper.kept.nbytes if keeper.kept else 0,
                        "full_peak_bytes": profile.peak_bytes(profile.names),
                        "plan_peak_bytes": profile.peak_bytes(names),
                        "loss_off": loss_off, "gradient_off": gradient_off,
                    }
                )  # fmt: skip
                keeper.release()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mobilenet_v2,resnet50")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/pets37"))
    parser.add_argument("--weights", type=folder_or_none, default=Path("../shared/weights"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--image-size", type=int, default=96)
    parser.add_argument("--keep-bytes", type=int, default=4 << 30)
    parser.add_argument("--groups", type=int, default=6, help="groups of images whose features are made")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=16, help="steps on kept features timed at once")
    parser.add_argument("--cache", type=Path, default=Path("runs/pixels"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    facts = where(args.device)
    rows: list[dict[str, Any]] = []
    for name in args.models.split(","):
        rows += [row | facts for row in rows_of(name, args)]
        write_csv(args.out / f"kept_steps_{args.device}_t{args.threads}_{args.image_size}px.csv", rows)
    print_table(
        rows,
        ["model", "share", "kept_as", "full_step_s", "plan_step_s", "kept_step_s", "speedup", "fill_of_forward",
         "kept_bytes", "loss_off", "gradient_off"],
    )  # fmt: skip


if __name__ == "__main__":
    main()
