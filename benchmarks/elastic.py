"""Elastic training, measured: is the budget kept, what does deciding cost, what does it hold, how accurate is it?

    python benchmarks/elastic.py budget --image-size 96 --data ../shared/data/pets37 --weights ../shared/weights
    python benchmarks/elastic.py memory --device cuda --batch-size 64 --data ... --weights ...
    python benchmarks/elastic.py accuracy --device cuda --data ../shared/data/cub200 --weights ... --jobs 10

budget: for each model and budget a real run under `et.Elastic`, with blocks of full steps of a twin network in between,
in the same process; the ratio is of the two sums of seconds, so a busy machine weighs on both. A budget below what the
cheapest plan takes is a row, too, with the least that would do. At 96 pixels, batch 4, one thread of two cores: about
800 full steps a network, a quarter of an hour for the three. What deciding costs is a share of a *whole* run, so that
figure wants one: `--models resnet50 --budgets 0.5 --steps 18000 --block 200` is 12 epochs of CUB-200 at batch 4 with
four plans, the paper's scale (`overhead`: profile, probes, choosing and applying over everything).

memory: the allocator's peak over a run at 0.5x against that of full training, everything in the process counted.
`deciding_bytes` is the peak while profiling and probing, which hold what a full step does.

accuracy: 12 epochs at batch 4. The learning rate of each method is the best on validation of one grid, tried for a
third of the epochs with seed 0; then three seeds at that rate, judged once on test. A rate that diverges is the worst.
Plans rest on one profile that was taken with the machine to itself (feedback off), so runs may share the GPU: `train_s`
are the seconds that they really took, `jobs` at a time; `alone_s` are those of their steps by the profile's prices, as
if each had had the machine to itself. How right such prices are is the budget suite's to say.

Every suite writes its table after each row and stops when `--minutes` are over; a row that fails is named at the end
and the others go on. Run it again to go on: accuracy does so by itself, the others with `--resume`, for rows of the
same commit, device and settings. On machines that forget and where little can be taken along:

    cp benchmarks/results/elastic_* $OUT; COMMIT=$(...) python benchmarks/elastic.py budget --device cuda --out $OUT \\
        --data noise --weights none --models resnet50,mobilenet_v2,vit_b_16 --steps 1000 --minutes 8 --resume
    COMMIT=... python benchmarks/elastic.py accuracy --device cuda --state $OUT/accuracy.tar.gz --minutes 8 ...

`--data noise` is random images on the device: time and memory do not depend on what they show. `--state` keeps what
finished cells of accuracy have left, without weights; a cell that was under way is lost with its machine, and goes on
from its last epoch where the machine is still the same one.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import elastictrainer as et

sys.path.insert(0, str(Path(__file__).parent))
from common import RESULTS, folder_or_none, kept_rows, pack, print_table, unpack, where, write_csv
from workloads import NOISE, images, loss_fn, network


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


class Table:
    """The rows of a suite, on disk after each; those of an earlier run of the same are kept if asked for."""

    def __init__(self, path: Path, args: argparse.Namespace) -> None:
        self.path = path
        self.facts = {"batch": args.batch_size, "image": args.image_size, "data": Path(args.data).name}
        self.facts |= {"steps": args.steps, "seed": args.seed} | where(args.device)
        self.rows: list[dict[str, Any]] = kept_rows(path, self.facts) if args.resume else []
        self.failed: list[str] = []

    def find(self, **key: Any) -> dict[str, Any] | None:
        told = {name: str(value) for name, value in key.items()}
        return next((r for r in self.rows if all(str(r.get(n)) == v for n, v in told.items())), None)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append({**row, **self.facts})
        write_csv(self.path, self.rows)

    @contextlib.contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """A row that cannot be had is named, and the others go on."""
        try:
            yield
        except Exception:  # a suite of hours: whatever it is, it must not cost the other rows
            traceback.print_exc()
            self.failed.append(what)

    def end(self, columns: list[str]) -> None:
        print_table(self.rows, columns)
        if self.failed:
            sys.exit(f"failed, see above: {', '.join(self.failed)}")


def budget_suite(args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    table = Table(args.out / f"elastic_budget_{args.device}_t{args.threads}.csv", args)
    for name in args.models.split(","):
        wanted = [asked for asked in map(float, args.budgets.split(",")) if not table.find(model=name, asked=asked)]
        if not wanted:
            continue
        with table.trying(name):
            shape = network(name, classes=2, weights=args.weights, image_size=args.image_size)
            data = images(args.data, shape, batch_size=args.batch_size, image_size=args.image_size, device=device)
            profile = None
            for asked in wanted:
                with table.trying(f"{name} at {asked:g}x"):
                    try:
                        row, profile = budget_row(name, asked, data, profile, args, device)
                    except et.BudgetError as error:  # below the floor of this network here: that, too, is a result
                        row = {"model": name, "asked": asked, "refused": str(error), "least": error.least}
                    table.add(row)
    table.end([
        "model", "asked", "ratio", "off_points", "stated_ratio", "steps", "plans", "profile_steps", "overhead",
        "full_step_s", "least",
    ])  # fmt: skip


def budget_row(
    name: str, asked: float, data: Any, profile: et.Profile | None, args: argparse.Namespace, device: torch.device
) -> tuple[dict[str, Any], et.Profile]:
    torch.manual_seed(args.seed)
    loaded = network(name, classes=data.num_classes, weights=args.weights, image_size=args.image_size)
    model = loaded.model.to(device).train()
    twin = copy.deepcopy(model)
    optimizer, twin_optimizer = sgd(model, 1e-3), sgd(twin, 1e-3)
    interval = f"{max(1, args.steps // 4)}steps"
    elastic = et.Elastic(
        model, optimizer, loss_fn, budget=asked, interval=interval, profile=profile, total_steps=args.steps
    )
    batches = endless(data.train, 4 * args.steps + 3)
    would_be_s, full_s, counted = 0.0, [], 0
    length = max(1, args.block // 4)
    with et.apply(twin, [n for n, _ in twin.named_parameters()]):
        for _ in range(3):
            step(twin, twin_optimizer, next(batches))
        for number, batch in enumerate(elastic.epoch(Stretch(batches, args.steps)), start=1):
            step(model, optimizer, batch)
            if number % args.block == 0:
                with elastic.pause():
                    step(twin, twin_optimizer, next(batches))  # finds the caches as the other network has left them
                    start = now(device)
                    for _ in range(length):
                        step(twin, twin_optimizer, next(batches))
                    full_s.append((now(device) - start) / length)
                    would_be_s += args.block * full_s[-1]
                    counted += args.block
    elastic.undo()
    stats, typical = elastic.stats, statistics.median(full_s)
    ratio = stats["spent_s"] / stats["steps"] * counted / would_be_s
    deciding_s = sum(stats["overhead_s"].values())
    assert elastic.profile is not None
    row = {
        "model": name,
        "asked": asked,
        "ratio": ratio,
        "off_points": 100 * (ratio - asked),
        "stated_ratio": stats["measured_ratio"],
        "plans": len(stats["plans"]),
        "full_step_s": typical,
        "overhead": deciding_s / (stats["spent_s"] + deciding_s),
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
    if device.type != "cuda":
        sys.exit("memory reads CUDA's allocator: give --device cuda (benchmarks/apply_memory.py is for the CPU)")
    table = Table(args.out / f"elastic_memory_{args.device}.csv", args)
    for name in args.models.split(","):
        with table.trying(name):
            shape = network(name, classes=2, weights=args.weights, image_size=args.image_size)
            data = images(args.data, shape, batch_size=args.batch_size, image_size=args.image_size, device=device)
            for policy, asked in [("full", 1.0), *(("elastic", float(b)) for b in args.budgets.split(","))]:
                if table.find(model=name, policy=policy, asked=asked):
                    continue
                with table.trying(f"{name} at {asked:g}x"):
                    try:
                        row = memory_row(name, policy, asked, data, args, device)
                    except et.BudgetError as error:
                        row = {"model": name, "policy": policy, "asked": asked, "refused": str(error)}
                    else:
                        full = row if policy == "full" else table.find(model=name, policy="full")
                        if full is not None:
                            row["full_bytes"] = int(float(full["peak_bytes"]))
                            row["of_full"] = row["peak_bytes"] / row["full_bytes"]
                    table.add(row)
    table.end(["model", "batch", "policy", "asked", "peak_bytes", "predicted_bytes", "deciding_bytes", "of_full"])


def memory_row(
    name: str, policy: str, asked: float, data: Any, args: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(args.seed)
    loaded = network(name, classes=data.num_classes, weights=args.weights, image_size=args.image_size)
    model = loaded.model.to(device).train()
    optimizer = sgd(model, 1e-3)
    peaks = {"deciding": 0, "training": 0}

    def note(what: str) -> None:
        torch.cuda.synchronize()
        peaks[what] = max(peaks[what], torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()

    @contextlib.contextmanager
    def deciding() -> Iterator[None]:
        note("training")
        try:
            yield
        finally:
            note("deciding")

    elastic = et.Elastic(
        model, optimizer, loss_fn, policy=policy, budget=asked, interval=f"{max(1, args.steps // 2)}steps",
        around=deciding,
    )  # fmt: skip
    torch.cuda.reset_peak_memory_stats()
    for batch in elastic.epoch(Stretch(endless(data.train, args.steps + 8), args.steps)):
        step(model, optimizer, batch)
    note("training")
    assert elastic.plan is not None
    row = {
        "model": name,
        "policy": policy,
        "asked": asked,
        "peak_bytes": peaks["training"],
        "predicted_bytes": max(event["peak_bytes"] for event in elastic.history),
        "deciding_bytes": peaks["deciding"],
        "before_bytes": before,
        "plans": len(elastic.history),
    }
    elastic.undo()
    return row


METHODS = {"full": ("full", "1x"), "elastic 0.5x": ("elastic", "0.5x"), "elastic 0.4x": ("elastic", "0.4x")}


def accuracy_suite(args: argparse.Namespace) -> None:
    """Stage by stage, `--jobs` cells at a time, each a process and a run folder; a finished cell is not run again."""
    args.runs.mkdir(parents=True, exist_ok=True)
    if args.state is not None:
        unpack(args.state, args.runs)
    here = where(args.device)
    rates = [float(r) for r in args.rates.split(",")]
    trial = max(1, args.epochs // 3)
    failed: list[str] = []
    try:
        for name in args.models.split(","):
            prices(name, args)
            cells = [cell(name, m, lr, 0, trial, args) for m in METHODS for lr in rates]
            finals: list[dict[str, Any]] = []

            def save(name: str = name, cells: list[Any] = cells, finals: list[Any] = finals) -> None:
                rows = [accuracy_row(name, c, args) | here for c in [*cells, *finals] if outcome(c) is not None]
                if rows:
                    write_csv(args.out / f"elastic_accuracy_{args.data.name}_{name}.csv", rows)
                if args.state is not None:
                    pack(args.state, args.runs, also=("*.profile.json", "*.profile_s.json"))

            save()  # the profile, too, is better kept than taken again
            failed += run_cells(cells, args, save)
            tried = [m for m in METHODS if all(outcome(c) is not None for c in cells if c["method"] == m)]
            best = {method: best_rate(cells, method) for method in tried}
            finals += [cell(name, m, best[m], seed, args.epochs, args) for seed in range(args.seeds) for m in tried]
            failed += run_cells(finals, args, save)
            save()
            summary(name, [accuracy_row(name, c, args) for c in finals if outcome(c) is not None], best, args)
    except OutOfTime:
        sys.exit("out of time: finished cells are kept, run again to go on")
    if failed:
        sys.exit(f"failed (errors are above): {', '.join(failed)}; run again to try them once more")


def prices(name: str, args: argparse.Namespace) -> None:
    """Decode the images once, and take the profile that all cells plan by, before anything shares the machine."""
    device = torch.device(args.device)
    shape = network(name, classes=2, weights=args.weights, image_size=args.image_size)
    data = images(
        args.data, shape, batch_size=args.batch_size, image_size=args.image_size, device=device,
        cache=args.runs / "pixels",
    )  # fmt: skip
    price = args.runs / f"{name}.profile.json"
    if price.exists():
        return
    loaded = network(name, classes=data.num_classes, weights=args.weights, image_size=args.image_size)
    model = loaded.model.to(device).train()
    batch = next(iter(data.train))
    start = now(device)
    profile = et.profile(model, loss_fn, batch, optimizer=sgd(model, 1e-3), captured=True)
    price.with_name(f"{name}.profile_s.json").write_text(json.dumps(now(device) - start))
    price.write_text(profile.to_json())
    del model, loaded, data, batch
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def summary(name: str, finals: list[dict[str, Any]], best: dict[str, float], args: argparse.Namespace) -> None:
    for method in best:
        last = [r for r in finals if r["method"] == method]
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
        row |= {f"{part}_s": made["overhead_s"][part] for part in ("probe", "select", "apply")}
        row |= {"profile_s": _profile_s(name, args), "peak_bytes": made["peak_bytes"]}
        row |= {"val_accuracy": max(made["accuracy"]["per_epoch"])}
        row |= {"test_accuracy": made["accuracy"]["final"] if stage == "final" else ""}
    return row


def _profile_s(name: str, args: argparse.Namespace) -> float | str:
    """What the profile took that all cells plan by; each alone would have taken one."""
    path = args.runs / f"{name}.profile_s.json"
    return float(json.loads(path.read_text())) if path.exists() else ""


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


class OutOfTime(Exception):
    """The minutes are over."""


def run_cells(cells: list[dict[str, Any]], args: argparse.Namespace, save: Callable[[], None]) -> list[str]:
    """Those that have no outcome yet, `--jobs` at a time; `save` is called whenever one has. Returns those that failed.

    Raises:
        OutOfTime: at `--minutes`; what was under way goes on from its last epoch next time, on the same disk.
    """
    waiting = [c for c in cells if outcome(c) is None]
    running: dict[subprocess.Popen[bytes], str] = {}
    failed = []
    try:
        while waiting or running:
            done = [process for process in running if process.poll() is not None]
            for process in done:
                folder = running.pop(process)
                if process.returncode:
                    failed.append(f"{Path(folder).name} (exit code {process.returncode})")
            if done:
                save()
            if time.monotonic() > args.until:
                raise OutOfTime
            while waiting and len(running) < args.jobs:
                c = waiting.pop(0)
                running[subprocess.Popen(cell_command(c, args), stdout=subprocess.DEVNULL)] = c["folder"]
            time.sleep(0.2)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
    return failed


def cell_command(c: dict[str, Any], args: argparse.Namespace) -> list[str]:
    command = [sys.executable, __file__, "cell", "--cell", json.dumps(c)]
    # The threads, too: a profile taken with others is refused.
    for name in ("runs", "data", "weights", "device", "threads", "batch_size", "image_size", "epochs"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    return command


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
        # A result has been written; gigabytes of weights of which nothing more is asked would fill a small disk.
        shutil.rmtree(Path(c["folder"]) / "checkpoint", ignore_errors=True)
        for weights in Path(c["folder"]).glob("*.safetensors"):
            weights.unlink()
    except et.TrainingError as error:
        if "out of memory" in str(error):
            raise
        # Written down, so that it is an outcome like any other and not tried again.
        (Path(c["folder"]) / "diverged.json").write_text(json.dumps({"diverged": str(error)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suites = {"budget": budget_suite, "memory": memory_suite, "accuracy": accuracy_suite, "cell": cell_suite}
    parser.add_argument("suite", choices=suites)
    parser.add_argument(
        "--models", default="resnet50,mobilenet_v2,vit_s", help="or any name of torchvision's: vit_b_16"
    )
    parser.add_argument("--budgets", default="0.35,0.5,0.7,0.9")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/pets37"), help=f"a folder, or {NOISE!r}")
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
    parser.add_argument("--minutes", type=float, help="stop by then; what is finished is kept, run again to go on")
    parser.add_argument("--resume", action="store_true", help="budget and memory: keep the rows that are there already")
    parser.add_argument(
        "--state", type=Path, help="accuracy: archive of what finished cells have left, without weights"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/elastic-accuracy"))
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.until = time.monotonic() + 60 * (args.minutes or 1e9)
    torch.set_num_threads(args.threads)
    if args.minutes is not None and args.suite in ("budget", "memory"):
        signal.signal(signal.SIGALRM, _out_of_time)
        signal.setitimer(signal.ITIMER_REAL, 60 * args.minutes)
    suites[args.suite](args)


def _out_of_time(number: int, frame: object) -> None:
    sys.exit("out of time: finished rows are kept, run again with --resume to go on")


if __name__ == "__main__":
    main()
