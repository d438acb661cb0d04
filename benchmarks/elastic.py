"""Elastic training, measured: is the budget kept, what does deciding cost, what does it hold, how accurate is it?

    python benchmarks/elastic.py budget --image-size 96 --data ../shared/data/pets37 --weights ../shared/weights
    python benchmarks/elastic.py memory --device cuda --batch-size 64 --data ... --weights ...
    python benchmarks/elastic.py accuracy --device cuda --data ../shared/data/cub200 --weights ... --jobs 10

budget: for each model and budget a real run under `et.Elastic`, with blocks of full steps of a twin network in between,
in the same process; the ratio is of the two sums of seconds, so a busy machine weighs on both. A budget below what the
cheapest plan takes is a row, too, with the least that would do. At 96 pixels, batch 4, one thread of two cores: about
800 full steps a network, a quarter of an hour for the three.

memory: the allocator's peak over a run at 0.5x against that of full training, everything in the process counted.

accuracy: 12 epochs at batch 4. The learning rate of each method is the best on validation of one grid, tried for a
third of the epochs with seed 0; then three seeds at that rate, judged once on test. A rate that diverges is the worst.
Plans rest on one profile that was taken with the machine to itself (feedback off), so runs may share the GPU: `train_s`
are the seconds that they really took, `jobs` at a time; `alone_s` are those of their steps by the profile's prices, as
if each had had the machine to itself. How right such prices are is the budget suite's to say.
"""

from __future__ import annotations

import argparse
import copy
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
from workloads import images, loss_fn, network


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """The paper's optimizer: SGD with momentum and decoupled decay."""
    from elastictrainer.runtime.optimizers import make_optimizer

    return make_optimizer("sgd", model.parameters(), lr=lr, weight_decay=1e-4)


def endless(loader: Any, steps: int) -> Iterator[Any]:
    epoch = 0
    while steps:
        loader.set_epoch(epoch)
        for batch in loader:
            yield batch
            steps -= 1
            if not steps:
                return
        epoch += 1


class Stretch:
    """So many batches of an endless loader: an epoch as long as the suite needs."""

    def __init__(self, batches: Iterator[Any], length: int) -> None:
        self.batches, self.length = batches, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.length):
            yield next(self.batches)


def budget_suite(args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    rows = []
    for name in args.models.split(","):
        shape = network(name, classes=2, weights=args.weights, image_size=args.image_size)
        data = images(args.data, shape, batch_size=args.batch_size, image_size=args.image_size, device=device)
        profile = None
        for asked in map(float, args.budgets.split(",")):
            try:
                row, profile = budget_row(name, asked, data, profile, args, device)
            except et.BudgetError as error:  # below the floor of this network here: that, too, is a result
                row = {"model": name, "batch": args.batch_size, "image": args.image_size, "asked": asked}
                row |= {"refused": str(error), "least": error.least}
            rows.append(row | where(args.device) | {"seed": args.seed})
            write_csv(args.out / f"elastic_budget_{args.device}_t{args.threads}.csv", rows)
    columns = [
        "model",
        "asked",
        "ratio",
        "off_points",
        "stated_ratio",
        "steps",
        "plans",
        "profile_steps",
        "full_step_s",
        "least",
    ]
    print_table(rows, columns)


def budget_row(
    name: str, asked: float, data: Any, profile: et.Profile | None, args: argparse.Namespace, device: torch.device
) -> tuple[dict[str, Any], et.Profile]:
    torch.manual_seed(args.seed)
    loaded = network(name, classes=data.num_classes, weights=args.weights, image_size=args.image_size)
    model = loaded.model.to(device).train()
    twin = copy.deepcopy(model)
    optimizer, twin_optimizer = sgd(model, 1e-3), sgd(twin, 1e-3)
    interval = f"{args.steps // 4}steps"
    elastic = et.Elastic(
        model, optimizer, loss_fn, budget=asked, interval=interval, profile=profile, total_steps=args.steps
    )
    batches = endless(data.train, 4 * args.steps)
    would_be_s, full_s, counted = 0.0, [], 0
    with et.apply(twin, [n for n, _ in twin.named_parameters()]):
        for _ in range(3):
            step(twin, twin_optimizer, next(batches))
        for number, batch in enumerate(elastic.epoch(Stretch(batches, args.steps)), start=1):
            step(model, optimizer, batch)
            if number % args.block == 0:
                with elastic.pause():
                    start = now(device)
                    for _ in range(args.block // 4):
                        step(twin, twin_optimizer, next(batches))
                    full_s.append((now(device) - start) / (args.block // 4))
                    would_be_s += args.block * full_s[-1]
                    counted += args.block
    elastic.undo()
    stats, typical = elastic.stats, statistics.median(full_s)
    ratio = stats["spent_s"] / stats["steps"] * counted / would_be_s
    assert elastic.profile is not None
    row = {
        "model": name,
        "batch": args.batch_size,
        "image": args.image_size,
        "asked": asked,
        "ratio": ratio,
        "off_points": 100 * (ratio - asked),
        "stated_ratio": stats["measured_ratio"],
        "steps": stats["steps"],
        "plans": len(stats["plans"]),
        "full_step_s": typical,
    }
    return row | {f"{part}_steps": seconds / typical for part, seconds in stats["overhead_s"].items()}, elastic.profile


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    loss_fn(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def memory_suite(args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    rows = []
    for name in args.models.split(","):
        shape = network(name, classes=2, weights=args.weights, image_size=args.image_size)
        data = images(args.data, shape, batch_size=args.batch_size, image_size=args.image_size, device=device)
        for policy, asked in [("full", 1.0), *(("elastic", float(b)) for b in args.budgets.split(","))]:
            loaded = network(name, classes=data.num_classes, weights=args.weights, image_size=args.image_size)
            model = loaded.model.to(device).train()
            optimizer = sgd(model, 1e-3)
            elastic = et.Elastic(model, optimizer, loss_fn, policy=policy, budget=asked, interval=f"{args.steps}steps")
            seen, predicted = 0, 0
            for number, batch in enumerate(elastic.epoch(Stretch(endless(data.train, args.steps + 8), args.steps))):
                if number == 2:
                    torch.cuda.reset_peak_memory_stats()
                step(model, optimizer, batch)
            torch.cuda.synchronize()
            seen = torch.cuda.max_memory_allocated()
            predicted = elastic.plan.peak_bytes if elastic.plan else 0
            elastic.undo()
            full = rows[-1]["full_bytes"] if policy != "full" else seen
            rows.append(
                {"model": name, "batch": args.batch_size, "policy": policy, "asked": asked, "peak_bytes": seen}
                | {"predicted_bytes": predicted, "full_bytes": full, "of_full": seen / full}
                | where(args.device)
                | {"seed": args.seed}
            )
            del model, optimizer, elastic, loaded
            torch.cuda.empty_cache()
    write_csv(args.out / f"elastic_memory_{args.device}.csv", rows)
    print_table(rows, ["model", "batch", "policy", "asked", "peak_bytes", "predicted_bytes", "of_full"])


METHODS = {"full": ("full", "1x"), "elastic 0.5x": ("elastic", "0.5x"), "elastic 0.4x": ("elastic", "0.4x")}


def accuracy_suite(args: argparse.Namespace) -> None:
    """Stage by stage, `--jobs` cells at a time, each a process and a run folder; a finished cell is not run again."""
    args.runs.mkdir(parents=True, exist_ok=True)
    device = torch.device(args.device)
    for name in args.models.split(","):
        shape = network(name, classes=2, weights=args.weights, image_size=args.image_size)
        data = images(
            args.data,
            shape,
            batch_size=args.batch_size,
            image_size=args.image_size,
            device=device,
            cache=args.runs / "pixels",
        )
        loaded = network(name, classes=data.num_classes, weights=args.weights, image_size=args.image_size)
        model = loaded.model.to(device).train()
        price = args.runs / f"{name}.profile.json"
        if not price.exists():
            batch = next(iter(data.train))
            price.write_text(et.profile(model, loss_fn, batch, optimizer=sgd(model, 1e-3), captured=True).to_json())
        del model, loaded, data
        if device.type == "cuda":
            torch.cuda.empty_cache()
        rates = [float(r) for r in args.rates.split(",")]
        trial = max(1, args.epochs // 3)
        cells = [cell(name, m, lr, 0, trial, args) for m in METHODS for lr in rates]
        run_cells(cells, args)
        best = {method: best_rate(cells, method) for method in METHODS}
        finals = [cell(name, m, best[m], seed, args.epochs, args) for seed in range(args.seeds) for m in METHODS]
        run_cells(finals, args)
        rows = [accuracy_row(name, c, args) for c in [*cells, *finals]]
        write_csv(args.out / f"elastic_accuracy_{args.data.name}_{name}.csv", rows)
        for method in METHODS:
            last = [r for r in rows if r["method"] == method and r["stage"] == "final"]
            got = [r["test_accuracy"] for r in last if not r["diverged"]]
            if got:
                spread = statistics.stdev(got) if len(got) > 1 else 0.0
                seconds = statistics.mean(r["alone_s"] for r in last if not r["diverged"])
                print(
                    f"{args.data.name} {name} {method}: {statistics.mean(got):.4f} +- {spread:.4f} of {len(got)}, "
                    f"{seconds:.0f} s, lr {best[method]:g}"
                )
            if len(got) < len(last):
                print(f"{args.data.name} {name} {method}: {len(last) - len(got)} of {len(last)} diverged")


def best_rate(cells: list[dict[str, Any]], method: str) -> float:
    """The learning rate of the best validation accuracy at its trial's end; one that diverged comes last."""
    tried = {c["lr"]: outcome(c) for c in cells if c["method"] == method}
    return max(tried, key=lambda lr: -1.0 if "diverged" in tried[lr] else tried[lr]["accuracy"]["per_epoch"][-1])


def accuracy_row(name: str, c: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    made = outcome(c)
    stage = "final" if c["epochs"] == args.epochs else "rate"
    row = {"model": name, "data": args.data.name, "stage": stage, "method": c["method"], "lr": c["lr"]}
    row |= {"seed": c["seed"], "epochs": c["epochs"], "batch": args.batch_size, "jobs": args.jobs}
    row |= {"diverged": made.get("diverged", "")}
    if not row["diverged"]:
        row |= {"steps": made["steps"], "best_epoch": made["best_epoch"], "predicted_ratio": made["predicted_ratio"]}
        row |= {"train_s": made["train_s"], "eval_s": made["eval_s"]}
        row |= {"alone_s": sum(plan["steps"] * plan["predicted_step_s"] for plan in made["plans"])}
        row |= {"val_accuracy": max(made["accuracy"]["per_epoch"])}
        row |= {"test_accuracy": made["accuracy"]["final"] if stage == "final" else ""}
    return row | where(args.device)


def cell(model: str, method: str, lr: float, seed: int, epochs: int, args: argparse.Namespace) -> dict[str, Any]:
    folder = args.runs / f"{args.data.name}-{model}-{method.replace(' ', '')}-lr{lr:g}-s{seed}-e{epochs}"
    return {"model": model, "method": method, "lr": lr, "seed": seed, "epochs": epochs, "folder": str(folder)}


def outcome(c: dict[str, Any]) -> Any:
    """What a cell has come to: its result, or that it diverged; None while it has to be run."""
    for name in ("result.json", "diverged.json"):
        path = Path(c["folder"]) / name
        if path.exists():
            return json.loads(path.read_text())
    return None


def run_cells(cells: list[dict[str, Any]], args: argparse.Namespace) -> None:
    waiting = [c for c in cells if outcome(c) is None]
    running: list[subprocess.Popen[bytes]] = []
    while waiting or running:
        failed = [p for p in running if p.poll()]
        running = [p for p in running if p.poll() is None]
        if failed:
            for process in running:
                process.terminate()
            sys.exit(f"a run failed (its error is above): {failed[0].args[4]}")  # type: ignore[index]
        if time.monotonic() > args.until:
            for process in running:
                process.terminate()
            sys.exit("out of time: finished cells are kept, run again to go on")
        while waiting and len(running) < args.jobs:
            c = waiting.pop(0)
            command = [sys.executable, __file__, "cell", "--cell", json.dumps(c), "--runs", str(args.runs)]
            command += ["--data", str(args.data), "--weights", str(args.weights), "--device", args.device]
            command += ["--batch-size", str(args.batch_size), "--image-size", str(args.image_size)]
            command += ["--epochs", str(args.epochs)]
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        time.sleep(0.2)


def cell_suite(args: argparse.Namespace) -> None:
    c = json.loads(args.cell)
    device = torch.device(args.device)
    shape = network(c["model"], classes=2, weights=args.weights, image_size=args.image_size)
    data = images(
        args.data,
        shape,
        batch_size=args.batch_size,
        image_size=args.image_size,
        device=device,
        seed=c["seed"],
        cache=args.runs / "pixels",
    )
    torch.manual_seed(c["seed"])
    loaded = network(
        c["model"], classes=data.num_classes, weights=args.weights, image_size=args.image_size, seed=c["seed"]
    )
    model = loaded.model.to(device)
    policy, asked = METHODS[c["method"]]
    try:
        et.fit(
            model,
            sgd(model, c["lr"]),
            loss_fn,
            data.train,
            epochs=c["epochs"],
            policy=policy,
            budget=asked,
            feedback=False,
            profile=args.runs / f"{c['model']}.profile.json",
            val_loader=data.val,
            test_loader=data.test if c["epochs"] == args.epochs else None,
            out=c["folder"],
            resume=True,
            seed=c["seed"],
            progress=False,
            checkpoint_every="1h",
        )
    except et.TrainingError as error:
        if "out of memory" in str(error):
            raise
        # Written down, so that it is an outcome like any other and not tried again.
        (Path(c["folder"]) / "diverged.json").write_text(json.dumps({"diverged": str(error)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suites = {"budget": budget_suite, "memory": memory_suite, "accuracy": accuracy_suite, "cell": cell_suite}
    parser.add_argument("suite", choices=suites)
    parser.add_argument("--models", default="resnet50,mobilenet_v2,vit_s")
    parser.add_argument("--budgets", default="0.35,0.5,0.7,0.9")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/pets37"))
    parser.add_argument("--weights", type=folder_or_none, default=Path("../shared/weights"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=160, help="budget and memory: steps of a run")
    parser.add_argument("--block", type=int, default=20, help="budget: steps between two blocks of full ones")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--rates", default="0.001,0.003,0.01", help="accuracy: the grid of learning rates")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="accuracy: runs at a time")
    parser.add_argument("--minutes", type=float, default=1e9, help="accuracy: stop by then; run again to go on")
    parser.add_argument("--runs", type=Path, default=Path("runs/elastic-accuracy"))
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.until = time.monotonic() + 60 * args.minutes
    torch.set_num_threads(args.threads)
    suites[args.suite](args)


if __name__ == "__main__":
    main()
