"""The best accuracy for any time: adaptive beside what is simpler, all within the same share of full training's time.

    python benchmarks/frontier.py --device cuda --data ../shared/data/pets37 --weights ../shared/weights --jobs 8
    python benchmarks/frontier.py --image-size 96 --models mobilenet_v2 --budgets 0.1 --seeds 1 --rates 0.003   # a CPU

Methods: adaptive; everything for fewer epochs (`shorter`, its steps cut off at the same seconds); a fixed suffix, head
alone, norms and biases, elastic as published and with random importance, each for as many passes as the time is for at
its own price of a step, of which the forward pass is always paid; LoRA (PEFT's, rank 8, on every convolution without
groups and every linear layer, the head in full) likewise, where peft is installed; full training. Every cell is a
process of its own with a deadline of the same seconds: `budget * epochs * steps * full step`, the full step timed once
for each model before anything else runs. Deciding, building of features and data loading are inside; evaluation is not.

The learning rate of each method and budget is the best on validation of one grid, tried with seed 0; then the other
seeds at that rate; all judged once on test. Seconds of cells that share a machine (`--jobs`) are longer for all alike,
so the clock of a cell is its own processor's where it has one (the share is of a full step timed in the same process).

Writes results/frontier_*.csv (a row a cell); prints means and spreads. Run again, it goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import elastictrainer as et

sys.path.insert(0, str(Path(__file__).parent))
from common import RESULTS, folder_or_none, print_table, where, write_csv
from elastic import sgd
from workloads import images, loss_fn, network

METHODS = ("adaptive", "shorter", "suffix", "head", "bn_bias", "elastic", "random")  # and lora, where peft is
SHARE = 0.5  # of a full step, for methods whose steps have a budget
CLIP = 1.0  # full training of MobileNetV2 at batch 4 diverges without it; all methods get it


def cell_name(cell: dict[str, Any]) -> str:
    return "-".join(str(cell[k]) for k in ("data", "model", "method", "budget", "lr", "seed"))


def run_cell(cell: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Train one cell and judge it; returns its row."""
    device = torch.device(args.device)
    shape = network(cell["model"], classes=2, weights=args.weights, image_size=args.image_size)
    data = images(
        args.data, shape, batch_size=args.batch_size, image_size=args.image_size, device=device, seed=cell["seed"],
        cache=args.runs / "pixels",
    )  # fmt: skip
    torch.manual_seed(cell["seed"])
    loaded = network(
        cell["model"], classes=data.num_classes, weights=args.weights, image_size=args.image_size, seed=cell["seed"]
    )
    model = loaded.model.to(device)
    optimizer = sgd(model, cell["lr"])
    method, budget = cell["method"], float(cell["budget"])
    shared: dict[str, Any] = {
        "val_loader": data.val, "test_loader": data.test, "seed": cell["seed"], "clip": CLIP, "progress": False,
    }  # fmt: skip
    start = time.perf_counter()
    if method == "adaptive":
        result = et.fit(model, optimizer, loss_fn, data.train, epochs=args.epochs, budget=budget, **shared)
    else:
        policy = {"shorter": "full", "full": "full"}.get(method, method)
        share = 1.0
        if method == "lora":
            full = priced(model, data.train, optimizer)
            model, policy = with_lora(model, loaded.head), "full"
            optimizer = sgd(model, cell["lr"])
            own = priced(model, data.train, optimizer)
            share, shared["profile"] = own.full_step_s / full.full_step_s, own
        elif policy != "full":
            # As many passes as fit, at the price of this method's own step.
            profile = priced(model, data.train, optimizer)
            share, shared["profile"] = SHARE, profile
            if not (found := et.policies.find_policy(policy)).needs_scores:
                share = found.plan(profile, None, budget=SHARE, pin="head").ratio
        part = Part(data.train, args.epochs * budget / share)
        result = et.fit(
            model, optimizer, loss_fn, part, epochs=part.epochs, policy=policy, feedback=False, budget=SHARE, **shared
        )
    wall_s = time.perf_counter() - start
    known = [a for a in result.accuracy["per_epoch"] if a is not None]
    return {
        **cell,
        "epochs": args.epochs,
        "batch": args.batch_size,
        "image": args.image_size,
        "steps": result.steps,
        "ratio": result.train_s / (result.full_step_s * args.epochs * len(data.train)) if result.full_step_s else "",
        "train_s": result.train_s,
        "wall_s": wall_s,
        "val_accuracy": max(known, default=0.0),
        "test_accuracy": result.accuracy["final"],
        "jobs": args.jobs,
        **where(args.device),
    }


def priced(model: nn.Module, loader: Any, optimizer: torch.optim.Optimizer) -> et.Profile:
    return et.profile(model.train(), loss_fn, next(iter(loader)), optimizer=optimizer, effort=30, captured=True)


def with_lora(model: nn.Module, head: tuple[str, ...]) -> nn.Module:
    """Low-rank updates beside every layer that PEFT can put them beside; the new head trains as it is."""
    from peft import LoraConfig, get_peft_model

    last = sorted({name.rpartition(".")[0] for name in head})
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Conv2d, nn.Linear)) and name not in last and getattr(module, "groups", 1) == 1
    ]
    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=layers, modules_to_save=last))


class Part:
    """A loader shortened so that whole epochs make up a fractional number of passes."""

    def __init__(self, loader: Any, passes: float) -> None:
        self.loader = loader
        self.epochs = max(1, round(passes))
        self.length = max(1, min(len(loader), round(passes * len(loader) / self.epochs)))
        self.batch_size = loader.batch_size

    def __len__(self) -> int:
        return self.length

    def iterate(self, epoch: int, *, start: int = 0) -> Iterator[Any]:
        for number, batch in enumerate(self.loader.iterate(epoch, start=start), start=start):
            if number >= self.length:
                return
            yield batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mobilenet_v2,resnet50")
    parser.add_argument("--budgets", default="0.05,0.1,0.2,0.5")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--data", type=Path, default=Path("../shared/data/pets37"))
    parser.add_argument("--weights", type=folder_or_none, default=Path("../shared/weights"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--rates", default="0.001,0.003,0.01")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--full", action="store_true", help="also full training, the yardstick at 1x")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--runs", type=Path, default=Path("runs/frontier"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.cell:
        cell = json.loads(args.cell)
        try:
            row = run_cell(cell, args)
        except et.ElasticTrainerError as error:  # a rate at which it diverges is the worst rate
            row = {**cell, "val_accuracy": 0.0, "test_accuracy": 0.0, "error": str(error)}
        path = args.runs / f"{cell_name(cell)}.json"
        path.with_suffix(".tmp").write_text(json.dumps(row))
        path.with_suffix(".tmp").replace(path)
        return
    args.runs.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * args.minutes
    for model in args.models.split(","):  # decode once, before anything runs beside anything
        shape = network(model, classes=2, weights=args.weights, image_size=args.image_size)
        images(
            args.data, shape, batch_size=args.batch_size, image_size=args.image_size, device=torch.device("cpu"),
            cache=args.runs / "pixels",
        )  # fmt: skip
    pairs = [(m, b) for b in args.budgets.split(",") for m in args.methods.split(",")]
    if args.full:
        pairs.insert(0, ("full", "1.0"))
    rates = [float(r) for r in args.rates.split(",")]
    first = [make(args, model, m, b, lr, 0) for model in args.models.split(",") for m, b in pairs for lr in rates]
    work(first, args, until)
    rest = []
    for model in args.models.split(","):
        for m, b in pairs:
            tried = [
                row for c in first if (row := read(c, args)) and (c["model"], c["method"], c["budget"]) == (model, m, b)
            ]
            if tried:
                best = max(tried, key=lambda row: row["val_accuracy"])["lr"]
                rest += [make(args, model, m, b, best, seed) for seed in range(args.seeds)]
    work([c for c in rest if c["seed"]], args, until)
    finals = [row for c in rest if (row := read(c, args))]
    chosen = {cell_name(row) for row in finals}
    rows = [
        {**row, "stage": "final" if cell_name(row) in chosen else "rate"}
        for c in [*first, *rest]
        if (row := read(c, args))
    ]
    unique = {cell_name(row): row for row in rows}
    write_csv(args.out / f"frontier_{args.data.name}_{args.device}.csv", unique.values())
    table = []
    for model in args.models.split(","):
        for m, b in pairs:
            got = [r for r in finals if (r["model"], r["method"], r["budget"]) == (model, m, b)]
            if got:
                accuracy = [r["test_accuracy"] for r in got]
                table.append(
                    {
                        "model": model, "budget": b, "method": m, "lr": got[0]["lr"], "seeds": len(got),
                        "test": statistics.mean(accuracy),
                        "spread": statistics.stdev(accuracy) if len(accuracy) > 1 else 0.0,
                        "ratio": statistics.mean(float(r.get("ratio") or 0) for r in got),
                        "train_s": statistics.mean(r.get("train_s", 0.0) for r in got),
                    }
                )  # fmt: skip
    print_table(table, ["model", "budget", "method", "lr", "seeds", "test", "spread", "ratio", "train_s"])


def make(args: argparse.Namespace, model: str, method: str, budget: str, lr: float, seed: int) -> dict[str, Any]:
    return {"data": args.data.name, "model": model, "method": method, "budget": budget, "lr": lr, "seed": seed}


def read(cell: dict[str, Any], args: argparse.Namespace) -> dict[str, Any] | None:
    path = args.runs / f"{cell_name(cell)}.json"
    return json.loads(path.read_text()) if path.exists() else None


def work(cells: list[dict[str, Any]], args: argparse.Namespace, until: float) -> None:
    """The cells that are not finished, the dearest first, `--jobs` at a time."""
    waiting = [c for c in cells if read(c, args) is None]
    waiting.sort(key=lambda c: -float(c["budget"]))
    running: list[subprocess.Popen[bytes]] = []
    names = ("data", "weights", "device", "threads", "batch_size", "image_size", "epochs", "runs", "jobs")
    shared = [text for n in names for text in (f"--{n.replace('_', '-')}", str(getattr(args, n)))]
    while waiting or running:
        running = [p for p in running if p.poll() is None]
        if time.monotonic() > until:
            for process in running:
                process.terminate()
            print("out of time: what is finished is kept, run again to go on", file=sys.stderr)
            return
        while waiting and len(running) < args.jobs:
            command = [sys.executable, __file__, "--cell", json.dumps(waiting.pop(0)), *shared]
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        time.sleep(0.2)


if __name__ == "__main__":
    main()
