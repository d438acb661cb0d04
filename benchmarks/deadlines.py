"""Deadlines: does a run that was told when to be done end by then, with everything written, whatever else happens?

    python benchmarks/deadlines.py                                 # the built-in network and images, half an hour
    python benchmarks/deadlines.py --model mobilenet_v2 --batch-size 4 --image-size 96      # on ../shared/data/pets37

`--runs` runs of `et.fit(budget="37s")`, their deadlines spread evenly on a scale of ratios from `--from-s` to `--to-s`,
in an order drawn by lot. In every third one, processes that multiply matrices as fast as they can, one for each core,
start at the middle of the time and stay to the end. Evaluation on validation and test images, checkpoints,
weights and the report are inside: the clock runs from the call of `et.fit` until it returns.

Runs have `GOMP_SPINCOUNT=3000` in their environment, as the command line sets it. `share` is of the test batches, where
the time was not enough for all.

Writes results/deadlines_*.csv (a row a run); prints it. `late` is the share of the deadline by which it was passed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import elastictrainer as et

sys.path.insert(0, str(Path(__file__).parent))
from common import RESULTS, folder_or_none, print_table, where, write_csv
from elastic import sgd
from workloads import images, loss_fn, network

BEGUN = "begun"
LOAD = "import numpy as n\na = n.random.rand(600, 600)\nwhile True: a @ a"


def run_one(deadline_s: float, args: argparse.Namespace) -> None:
    """In a process of its own: train until then, and say how it went."""
    device = torch.device(args.device)
    if args.model == "builtin":
        from elastictrainer.data import load_images, load_model

        loaded = load_model("builtin", num_classes=10, seed=args.seed)
        data = load_images(
            "builtin", image_size=loaded.image_size, normalize=loaded.normalisation, batch_size=args.batch_size,
            device=device, seed=args.seed,
        )  # fmt: skip
    else:
        shape = network(args.model, classes=2, weights=args.weights, image_size=args.image_size)
        data = images(
            args.data, shape, batch_size=args.batch_size, image_size=args.image_size, device=device,
            cache=args.folder / "pixels",
        )  # fmt: skip
        loaded = network(args.model, classes=data.num_classes, weights=args.weights, image_size=args.image_size)
    model = loaded.model.to(device)
    print(BEGUN, flush=True)
    start = time.perf_counter()
    result = et.fit(
        model, sgd(model, args.lr), loss_fn, data.train, epochs=args.epochs, budget=f"{deadline_s}s", clip=1.0,
        val_loader=data.val, test_loader=data.test, out=args.folder / f"{deadline_s:g}s", progress=False,
        seed=args.seed,
    )  # fmt: skip
    took_s = time.perf_counter() - start
    document = {
        "took_s": took_s,
        "steps": result.steps,
        "train_s": result.train_s,
        "eval_s": result.eval_s,
        "full_step_s": result.full_step_s,
        "accuracy": result.accuracy["final"],
        "share": result.accuracy.get("share", 1.0),
    }
    print(json.dumps(document), flush=True)


def watch_one(deadline_s: float, loaded: bool, args: argparse.Namespace) -> dict[str, Any]:
    """Start a run, press on the machine half-way if that is its lot, and wait."""
    names = (
        "model",
        "device",
        "threads",
        "batch_size",
        "image_size",
        "epochs",
        "lr",
        "seed",
        "data",
        "weights",
        "folder",
    )
    shared = [text for n in names for text in (f"--{n.replace('_', '-')}", str(getattr(args, n)))]
    pressing: list[subprocess.Popen[bytes]] = []
    with subprocess.Popen(
        [sys.executable, __file__, "--one", str(deadline_s), *shared],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"GOMP_SPINCOUNT": "3000"},
    ) as run:
        assert run.stdout is not None
        try:
            if run.stdout.readline().strip() == BEGUN and loaded:
                time.sleep(deadline_s / 2)
                pressing = [subprocess.Popen([sys.executable, "-c", LOAD]) for _ in range(args.pressing)]
            printed = run.stdout.read()
        finally:
            for process in pressing:
                process.kill()
                process.wait()
    if run.returncode:
        raise SystemExit(f"deadlines: the run of {deadline_s} s failed; its error is above")
    got = json.loads(printed)
    return {"deadline_s": deadline_s, "load": len(pressing), "late": got["took_s"] / deadline_s - 1, **got}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/pets37"))
    parser.add_argument("--weights", type=folder_or_none, default=Path("../shared/weights"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pressing", type=int, default=2, help="processes that compete")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--image-size", type=int, default=96)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--from-s", type=float, default=10)
    parser.add_argument("--to-s", type=float, default=300)
    parser.add_argument("--note", default="", help="what else the machine was doing")
    parser.add_argument("--folder", type=Path, default=Path("runs/deadlines"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--one", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.one is not None:
        run_one(args.one, args)
        return
    shutil.rmtree(args.folder, ignore_errors=True)
    rng = np.random.default_rng(args.seed)
    deadlines = np.geomspace(args.from_s, args.to_s, args.runs).round(1)
    facts = {
        "model": args.model, "batch": args.batch_size, "seed": args.seed, "note": args.note, **where(args.device),
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    for place in rng.permutation(args.runs):
        rows.append(watch_one(float(deadlines[place]), place % 3 == 1, args) | facts)
        print_table(rows[-1:], ["deadline_s", "load", "took_s", "late", "steps", "accuracy"])
        write_csv(args.out / f"deadlines_{args.model}_{args.device}.csv", sorted(rows, key=lambda r: r["deadline_s"]))
    rows.sort(key=lambda row: row["deadline_s"])
    print_table(rows, ["deadline_s", "load", "took_s", "late", "steps", "train_s", "eval_s", "accuracy", "share"])
    print(f"the latest: {max(row['late'] for row in rows):+.2%} of its deadline")


if __name__ == "__main__":
    main()
