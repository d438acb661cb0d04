"""The best accuracy for any time: adaptive beside what is simpler, all within the same share of full training's time.

    python benchmarks/frontier.py --device cuda --data ../shared/data/pets37 --weights ../shared/weights --minutes 9
    python benchmarks/frontier.py --image-size 96 --models mobilenet_v2 --budgets 0.1 --seeds 1 --rates 0.003   # a CPU

Methods: adaptive; everything for fewer epochs (`shorter`, its steps cut off at the same seconds); a fixed suffix, head
alone, norms and biases, elastic as published and with random importance, each for as many passes as the time is for at
its own price of a step, of which the forward pass is always paid; LoRA (PEFT's, rank 8, on every convolution without
groups and every linear layer, the head in full) likewise, where peft is installed; full training. All run on the same
engine: on CUDA every method's steps are recorded and replayed.

Each network is priced once, alone, before anything else runs, and these prices (`prices_s` of profiling) are given to
all methods alike, as on a machine that has seen the network before. A budget is `budget * epochs * steps * full step`
by them. Probing, choosing, building of features and data loading are inside; evaluation is not. `of_eager` is the time
taken over that of plain eager PyTorch's full training, whose step is priced beside the recorded one.

The learning rate of each method is the best on validation of one grid, tried at `--rate-budget` with seed 0; then all
budgets and seeds at that rate, each judged once on test. With `--jobs` above 1 cells share the machine and their
seconds; only alone does a row say what a user would see, and `jobs` is in every row.

Writes results/frontier_*.csv (a row a cell); prints means and spreads. Run again, it goes on where it was stopped; on a
machine that forgets, `--state FILE.tar.gz` brings along what was finished.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import elastictrainer as et

sys.path.insert(0, str(Path(__file__).parent))
from common import RESULTS, folder_or_none, print_table, unpack, where, write_csv
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
    prices = Prices.read(args.runs, cell["model"])
    profile = shared["profile"] = prices.profile
    start = time.perf_counter()
    if method == "adaptive":
        result = et.fit(model, optimizer, loss_fn, data.train, epochs=args.epochs, budget=budget, **shared)
    else:
        policy = {"shorter": "full", "full": "full"}.get(method, method)
        share = 1.0
        if method == "lora":
            model, policy = with_lora(model, loaded.head), "full"
            optimizer = sgd(model, cell["lr"])
            own = priced(model, data.train, optimizer, captured=True)
            share, shared["profile"] = own.full_step_s / profile.full_step_s, own
            start = time.perf_counter()
        elif policy != "full":
            # As many passes as fit, at the price of this method's own step.
            share = SHARE
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
        "ratio": result.train_s / (profile.full_step_s * args.epochs * len(data.train)),
        "of_eager": result.train_s / (prices.eager_step_s * args.epochs * len(data.train)),
        "full_step_s": profile.full_step_s,
        "eager_step_s": prices.eager_step_s,
        "prices_s": prices.took_s,
        "graphs": (result.graphs or {}).get("replayed", 0),
        "train_s": result.train_s,
        "wall_s": wall_s,
        "val_accuracy": max(known, default=0.0),
        "test_accuracy": result.accuracy["final"],
        "jobs": args.jobs,
        **where(args.device),
    }


@dataclass(frozen=True, slots=True)
class Prices:
    """A network's profile on this engine, the full step of plain eager PyTorch, and what finding out took."""

    profile: et.Profile
    eager_step_s: float
    took_s: float

    @classmethod
    def read(cls, runs: Path, model: str) -> Prices:
        document = json.loads((runs / f"{model}.prices.json").read_text())
        return cls(et.Profile.from_dict(document["profile"]), document["eager_step_s"], document["took_s"])


def price(model_name: str, data: Any, args: argparse.Namespace) -> None:
    """Price a network, alone on the machine, unless that has been done."""
    path = args.runs / f"{model_name}.prices.json"
    if path.exists():
        return
    loaded = network(model_name, classes=data.num_classes, weights=args.weights, image_size=args.image_size)
    model = loaded.model.to(args.device)
    optimizer = sgd(model, 1e-3)
    start = time.perf_counter()
    profile = priced(model, data.train, optimizer, captured=True)
    took_s = time.perf_counter() - start
    eager = priced(model, data.train, optimizer, captured=False) if profile.captured else profile
    document = {"profile": profile.to_dict(), "eager_step_s": eager.full_step_s, "took_s": took_s}
    path.with_suffix(".tmp").write_text(json.dumps(document))
    path.with_suffix(".tmp").replace(path)


def priced(model: nn.Module, loader: Any, optimizer: torch.optim.Optimizer, *, captured: bool) -> et.Profile:
    return et.profile(model.train(), loss_fn, next(iter(loader)), optimizer=optimizer, captured=captured)


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
        self.epochs = max(1, math.ceil(passes - 1e-9))
        self.length = max(1, round(passes * len(loader) / self.epochs))
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
    parser.add_argument("--budgets", default="0.02,0.05,0.1,0.2,0.3,0.5")
    parser.add_argument("--rate-budget", default="0.1", help="the budget at which learning rates are tried")
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
    parser.add_argument("--state", type=Path, help="finished cells, packed into one file and out of it")
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
    if args.state is not None:
        unpack(args.state, args.runs)
    for model in args.models.split(","):  # decoded and priced before anything runs beside anything
        shape = network(model, classes=2, weights=args.weights, image_size=args.image_size)
        data = images(
            args.data, shape, batch_size=args.batch_size, image_size=args.image_size, device=torch.device(args.device),
            cache=args.runs / "pixels",
        )  # fmt: skip
        price(model, data, args)
        del data
    pairs = [(m, b) for b in args.budgets.split(",") for m in args.methods.split(",")]
    if args.full:
        pairs.insert(0, ("full", "1.0"))
    rates = [float(r) for r in args.rates.split(",")]
    models, methods = args.models.split(","), dict.fromkeys(m for m, _ in pairs)
    first = [make(args, model, m, args.rate_budget, lr, 0) for model in models for m in methods for lr in rates]
    work(first, args, until)
    rest = []
    for model in models:
        for m, b in pairs:
            tried = [row for c in first if (c["model"], c["method"]) == (model, m) and (row := read(c, args))]
            if len(tried) == len(rates):
                best = max(tried, key=lambda row: row["val_accuracy"])["lr"]
                rest += [make(args, model, m, b, best, seed) for seed in range(args.seeds)]
    rest.sort(key=lambda c: c["seed"])
    work(rest, args, until)
    if args.state is not None:
        with tarfile.open(args.state.with_name(args.state.name + ".tmp"), "w:gz") as archive:
            for path in sorted(args.runs.glob("*.json")):
                archive.add(path, path.name)
        args.state.with_name(args.state.name + ".tmp").replace(args.state)
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
                        "of_eager": statistics.mean(float(r.get("of_eager") or 0) for r in got),
                        "train_s": statistics.mean(r.get("train_s", 0.0) for r in got),
                    }
                )  # fmt: skip
    print_table(table, ["model", "budget", "method", "lr", "seeds", "test", "spread", "ratio", "of_eager", "train_s"])


def make(args: argparse.Namespace, model: str, method: str, budget: str, lr: float, seed: int) -> dict[str, Any]:
    return {"data": args.data.name, "model": model, "method": method, "budget": budget, "lr": lr, "seed": seed}


def read(cell: dict[str, Any], args: argparse.Namespace) -> dict[str, Any] | None:
    path = args.runs / f"{cell_name(cell)}.json"
    return json.loads(path.read_text()) if path.exists() else None


def work(cells: list[dict[str, Any]], args: argparse.Namespace, until: float) -> None:
    """The cells that are not finished, the dearest first, `--jobs` at a time."""
    waiting = [c for c in cells if read(c, args) is None]
    waiting.sort(key=lambda c: (c["seed"], -float(c["budget"])))  # the first seed of everything, the dearest first
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
