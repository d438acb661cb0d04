"""The paper's comparison, on equal terms and with the controls that it left out.

    python benchmarks/paper.py --device cuda --data ../shared/data --weights ../shared/weights
    python benchmarks/paper.py --dry-run                      # every suite, tiny, on this CPU: three minutes

Suites, all of them by default (`--suites half,rest,run,similarity,resolution`):

half        what can be had for half of full training's time: full training, full training for half the epochs, a fixed
            suffix, random importance, elastic by three importances; three seeds.
rest        one seed: elastic at 0.35x, 0.4x, 0.6x and 0.7x; head; bn_bias; prunetrain.
run         the run's budget kept by choosing what and how often, beside fewer epochs of everything, at 0.1x, 0.25x and
            0.5x; three seeds.
similarity  how alike importance is from interval to interval, and by the number of probe batches (Fig. 7).
resolution  what the knapsack's resolution costs and gives on a real profile (Fig. 13b).

12 epochs, batch 4, SGD with momentum and decoupled decay, cosine; the learning rate of each method is the best on
validation of one grid (see `elastictrainer compare`). A rate that diverges is out, and a network whose every rate does
wants `--clip`, with `--runs` of its own. The grids share one folder of cells: what several hold is run once.

Everything is resumable: run it again. `--minutes` are over as if by Ctrl-C, and what is finished is in the tables,
beside the rows of networks and images that were not asked for this time. On machines that forget, `--state FILE.tar.gz`
keeps what finished cells have left, without weights: unpacked at the start, packed again after every suite and at the
end. With `--jobs`, cells share the machine: they plan by prices that were taken alone, and `alone_s` are their seconds
by these; methods that go by the clock run alone nevertheless.

A lent machine, in pieces of nine minutes (64 MiB travel a call, so weights and images go ahead, one call each):

    mkdir -p carry/lib; cp -r ../shared/weights ../shared/data/cub200 ../shared/data/pets37 carry/
    cp -r .venv/lib/python3*/site-packages/{typer,shellingham,click,rich,yaml,markdown_it,mdurl,pygments} carry/lib/
    cp -r .venv/lib/python3*/site-packages/{annotated_doc,torch_pruning} carry/lib/
    run: ls carry                      # carry: [carry/weights], then [carry/cub200], then [carry/pets37], [carry/lib]
    run: export PYTHONPATH=src:carry/lib PYTHONUNBUFFERED=1 COMMIT=...; cp carry/paper.tar.gz $OUT/; \\
         nvidia-cuda-mps-control -d; \\
         python3 benchmarks/paper.py --suites half --models resnet50 --sets cub200,pets37 --device cuda --jobs 8 \\
         --data carry --weights carry/weights --minutes 8.5 --out $OUT --state $OUT/paper.tar.gz
    and here: cp OUT/paper_*.csv benchmarks/results/; cp OUT/paper.tar.gz carry/     # carry: [carry/paper.tar.gz]

Without NVIDIA's MPS, which the second line starts, processes take turns on the GPU. The last run again and again, then
with `--suites rest`, `run` and `similarity,resolution`, and `--models mobilenet_v2`. While the machine stays the same
one, cells that were under way go on, too; with its end they are lost.

Overheads (Table 1) are columns of the tables: profile, probe, select.

Writes results/paper_{half,rest,run}_*.csv (a row a cell), paper_similarity_*.csv and paper_resolution_*.csv.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import yaml

import elastictrainer as et
from elastictrainer.compare import Comparison, Grid
from elastictrainer.compare.board import make_board

sys.path.insert(0, str(Path(__file__).parent))
from common import RESULTS, commit, folder_or_none, pack, print_table, read_csv, unpack, where, with_others, write_csv
from workloads import NAMES, WEIGHTS, images, loss_fn, network

GRIDS: dict[str, dict[str, Any]] = {
    "half": {
        "policies": ["full", "shorter", "suffix", "random", "elastic"],
        "importances": ["elastic", "magnitude", "gradient"],
        "budgets": ["0.5x"],
    },
    "rest": {"policies": ["head", "bn_bias", "prunetrain", "elastic"], "budgets": ["0.35x", "0.4x", "0.6x", "0.7x"]},
    "run": {"policies": ["adaptive", "shorter"], "budgets": ["0.1x", "0.25x", "0.5x"]},
}
ASKED = ("*/comparison.yaml", "*/train.yaml", "*/profile.yaml", "*/profiles/*.json")


def compare_suite(name: str, args: argparse.Namespace) -> None:
    """One of the grids, by `elastictrainer.compare`; its table is copied to the results, with the commit."""
    out = args.runs / "compared"
    models = args.models.split(",")
    data = [str(args.data / d) for d in args.sets.split(",")]
    grid = Grid.of(
        models=[NAMES.get(m, f"torchvision/{m}") for m in models],
        data=data,
        weights=[] if args.weights is None else [str(recipe(m, args)) for m in models],
        **GRIDS[name],
        rates=args.rates.split(","),
        seeds=[0] if name == "rest" else range(args.seeds),
        epochs=args.epochs,
    )
    shared = {
        "image-size": args.image_size, "batch-size": args.batch_size, "optimizer": "sgd", "weight-decay": 1e-4,
        "schedule": "cosine", "interval": "3", "device": args.device,
    }  # fmt: skip
    if args.device == "cpu":
        shared["threads"] = args.threads
    if args.clip is not None:
        shared["clip"] = args.clip
    asked = {"epochs": args.epochs, "tune-epochs": grid.tune_epochs, **shared}
    with make_board(wanted=True) as board:
        comparison = Comparison(
            grid, out, shared=shared, asked=asked, resume=True, jobs=args.jobs, keep_weights=False, board=board
        )
        try:
            outcome = comparison.run()
        finally:  # stopped, too: a piece of the suite is a piece of the table
            if (out / "results.csv").exists():
                rows = [{**row, "data": Path(row["data"]).name} for row in read_csv(out / "results.csv")]
                rows = [{**row, "commit": row["commit"] or commit()} for row in rows]
                save(
                    f"paper_{name}_{args.tag}.csv", [{k: v for k, v in r.items() if k != "folder"} for r in rows], args
                )
    for failed, why in outcome.failed.items():
        print(f"failed: {failed}: {why}", file=sys.stderr)


def save(name: str, rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """A suite's table, with the rows of networks and images that were not asked for this time."""
    key = [column for column in ("model", "data") if rows and column in rows[0]]
    write_csv(args.out / name, with_others(args.out / name, rows, key))


def recipe(model: str, args: argparse.Namespace) -> Path:
    """What the network's weights need, as a file for `--weights`; a random start where there is no file for it."""
    special = dict(WEIGHTS.get(model, {}))
    file = special.pop("file", None)
    if file is None or not (args.weights / file).exists():
        sys.exit(
            f"paper: {args.weights} holds no weights for {model}; leave --weights out to train from a random start"
        )
    path: Path = args.runs / "recipes" / f"{model}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({"file": str((args.weights / file).resolve()), **special}))
    return path


def similarity_suite(args: argparse.Namespace) -> None:
    """Cosine similarity of importance: between plans that lie some epochs apart, and of few probe batches to many."""
    rows = []
    for name in args.models.split(","):
        for data_set in args.sets.split(","):
            model, data, device = load(name, data_set, args)
            # By batches as training begins; by epochs in a run of which, once it is finished, the plans are enough.
            asked = probe_rows(model, sgd(model, 1e-3), data, args)
            out = args.runs / "similarity" / f"{name}-{data_set}"
            if not (out / "result.json").exists():
                et.fit(
                    model, sgd(model, float(args.rates.split(",")[0])), loss_fn, data.train, epochs=args.epochs,
                    policy="elastic", budget="0.5x", interval=1, out=out, resume=True, val_loader=data.val,
                    progress=False,
                )  # fmt: skip
            events = [json.loads(line) for line in (out / "plans.jsonl").read_text().splitlines()]
            scores = {e["epoch"]: e["scores"] for e in events if e["reason"] in ("first", "interval")}
            facts = {"model": name, "data": data_set} | where(args.device) | {"seed": 0, "commit": commit()}
            for apart in range(1, args.epochs):
                pairs = [cosine(scores[e], scores[e + apart]) for e in scores if e + apart in scores]
                if pairs:
                    rows.append(
                        {"what": "epochs apart", "count": apart, "pairs": len(pairs), "cosine": float(np.mean(pairs)),
                         "least": min(pairs)} | facts
                    )  # fmt: skip
            rows += [row | facts for row in asked]
            save(f"paper_similarity_{args.tag}.csv", rows, args)
            del model, data
            if device.type == "cuda":
                torch.cuda.empty_cache()
    print_table(rows, ["model", "data", "what", "count", "pairs", "cosine", "least"])


def probe_rows(model: Any, optimizer: Any, data: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """So many batches against others, many: what a probe of that size knows of the truth."""
    many = 4 * args.probes[-1]
    batches = []
    for epoch in range(100, 200):
        batches += list(data.train.iterate(epoch))[: many * (args.repeats + 1) - len(batches)]
        if len(batches) == many * (args.repeats + 1):
            break
    measure = lambda chosen: et.importance.elastic(model, optimizer, loss_fn, chosen)  # noqa: E731
    truth = measure(batches[:many])
    rows = []
    for count in args.probes:
        alike = [cosine(measure(batches[many * r : many * r + count]), truth) for r in range(1, args.repeats + 1)]
        rows.append(
            {"what": "probe batches", "count": count, "pairs": len(alike), "cosine": float(np.mean(alike)),
             "least": min(alike)}
        )  # fmt: skip
    return rows


def resolution_suite(args: argparse.Namespace) -> None:
    """Importance reached and milliseconds by the knapsack's cells, against the finest."""
    from elastictrainer.budget import Budget
    from elastictrainer.selection.prices import Prices
    from elastictrainer.selection.solve import solve

    rows = []
    for name in args.models.split(","):
        model, data, _ = load(name, args.sets.split(",")[0], args)
        optimizer = sgd(model, 1e-3)
        batches = list(data.train.iterate(0))[:6]
        profile = et.profile(model, loss_fn, batches[0], optimizer=optimizer)
        scores = et.importance.elastic(model, optimizer, loss_fn, batches)
        wanted = [k for k, tensor in enumerate(profile.names) if scores[tensor] > 0]
        values = np.array([scores[profile.names[k]] for k in wanted])
        lane = max(profile.lanes, key=lambda lane: lane.fixed_s + lane.reach_s.sum() + lane.train_s.sum())
        found = []
        for budget in (0.4, 0.5, 0.6, 0.7):
            prices = Prices(profile, wanted, [])
            problem = prices.problem(values, [prices.clock(lane, Budget("ratio", budget).seconds(profile.full_step_s))])
            for cells in args.cells:
                start = time.perf_counter()
                value = solve(problem, resolution=cells).value
                found.append((budget, cells, value, 1e3 * (time.perf_counter() - start)))
        for budget, cells, value, ms in found:
            best = max(v for b, _, v, _ in found if b == budget)
            rows.append(
                {"model": name, "budget": f"{budget:g}x", "cells": cells, "of_best": value / best if best else None,
                 "ms": ms, "tensors": len(profile.names)} | where(args.device) | {"seed": 0, "commit": commit()}
            )  # fmt: skip
        save(f"paper_resolution_{args.tag}.csv", rows, args)
    print_table(rows, ["model", "budget", "cells", "of_best", "ms"])


def load(name: str, data_set: str, args: argparse.Namespace) -> tuple[Any, Any, torch.device]:
    device = torch.device(args.device)
    shape = network(name, classes=2, weights=args.weights, image_size=args.image_size)
    data = images(
        args.data / data_set, shape, batch_size=args.batch_size, image_size=args.image_size, device=device,
        cache=args.runs / "pixels",
    )  # fmt: skip
    torch.manual_seed(0)
    loaded = network(name, classes=data.num_classes, weights=args.weights, image_size=args.image_size)
    return loaded.model.to(device).train(), data, device


def sgd(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    from elastictrainer.runtime.optimizers import make_optimizer

    return make_optimizer("sgd", model.parameters(), lr=lr, weight_decay=1e-4)


def cosine(a: dict[str, float], b: dict[str, float]) -> float:
    x, y = (np.array([scores[name] for name in a]) for scores in (a, b))
    return float(x @ y / (np.linalg.norm(x) * np.linalg.norm(y)))


# -- the whole of it -------------------------------------------------------------------------------------------------


def tiny(args: argparse.Namespace) -> None:
    """Three classes of digits as a folder, a small network, everything short: what is tried is the suite itself."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    args.data, args.sets, args.models, args.weights = args.runs / "data", "digits", "resnet18", None
    for split, (start, end) in {"train": (0, 120), "val": (120, 130), "test": (130, 140)}.items():
        for label in range(3):
            folder = args.data / "digits" / split / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            for place in np.flatnonzero(digits.target == label)[start:end]:
                pixels = (digits.images[place] * 255 / 16).astype(np.uint8)
                Image.fromarray(pixels).resize((32, 32)).convert("RGB").save(folder / f"{place}.png")
    for grid in GRIDS.values():
        grid["budgets"] = [budget for budget in grid["budgets"] if float(budget[:-1]) >= 0.5] or grid["budgets"]
    args.image_size, args.epochs, args.seeds, args.rates, args.device = 32, 2, 1, "0.01", "cpu"
    args.probes, args.repeats, args.cells = [1, 2], 1, [100, 1000]
    args.tag = "dry"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", default="half,rest,run,similarity,resolution")
    parser.add_argument("--models", default="resnet50,mobilenet_v2")
    parser.add_argument("--sets", default="cub200,pets37", help="folders of --data")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument(
        "--weights", type=folder_or_none, help="folder of weights; without it, or `none`, networks start at random"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--rates", default="0.001,0.003,0.01")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--clip", type=float, help="the largest norm of gradients, for all methods alike")
    parser.add_argument(
        "--jobs", type=int, default=1, help="cells at a time; above 1 seconds are by prices taken alone"
    )
    parser.add_argument("--minutes", type=float, help="stop by then, as with Ctrl-C; run it again to go on")
    parser.add_argument("--runs", type=Path, default=Path("runs/paper"))
    parser.add_argument("--state", type=Path, help="archive of what finished runs have left, without weights")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--dry-run", action="store_true", help="every suite, tiny, on this CPU; results under --runs")
    args = parser.parse_args()
    args.probes, args.repeats, args.cells = [1, 2, 4, 6, 8, 16], 5, [50, 100, 200, 500, 1000, 2000, 5000, 10_000]
    args.tag = args.device
    if args.dry_run:
        args.out = args.runs / "results"
        tiny(args)
    torch.set_num_threads(args.threads)
    suites: dict[str, Callable[[argparse.Namespace], None]] = {
        "half": lambda a: compare_suite("half", a),
        "rest": lambda a: compare_suite("rest", a),
        "run": lambda a: compare_suite("run", a),
        "similarity": similarity_suite,
        "resolution": resolution_suite,
    }
    unknown = sorted(set(args.suites.split(",")) - set(suites))
    if unknown:
        parser.error(f"unknown suites: {', '.join(unknown)}; known: {', '.join(suites)}")
    if args.state is not None:
        unpack(args.state, args.runs)
    if args.minutes is not None:
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, 60 * args.minutes)
    try:
        for name in args.suites.split(","):
            suites[name](args)
            if args.state is not None:
                pack(args.state, args.runs, also=ASKED)
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if args.state is not None:
            pack(args.state, args.runs, also=ASKED)
        sys.exit("paper: stopped; finished cells are kept, run it again to go on")


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.raise_signal(signal.SIGINT)  # whoever is training finishes the step and writes a checkpoint


if __name__ == "__main__":
    main()
