r"""Few-shot adaptation, measured: how accurate, in how many bytes, multiply-adds and seconds, method by method.

    python benchmarks/tinytrain.py episodes --models mobilenet_v2,builtin --batch-sizes 25 --device cuda --jobs 12 \
        --data ../shared/data --weights ../shared/weights [--meta runs/meta] [--minutes 9 --state $OUT/tiny.tar.gz]
    python benchmarks/tinytrain.py memory --models mobilenet_v2,builtin --data ../shared/data
    python benchmarks/tinytrain.py greedy --models mobilenet_v2,builtin --weights ../shared/weights --episodes 10
    python benchmarks/tinytrain.py seconds --models mobilenet_v2,builtin --weights ../shared/weights --threads 1
    python benchmarks/tinytrain.py layers --threads 1

episodes: every method on every task from the same network, images, views and batch, in turns, beginning with another
one each time. The learning rate of each method is the best of one grid on tasks of the source domain's held-out
classes, never of the domains it is judged on. With `--meta DIR`, again with the weights of `DIR/MODEL` (left there by
`elastictrainer metatrain`). Batch sizes are what backward holds at once; every method has the same. `versus_full` is
the median over tasks of (deciding + training) seconds over full training's on the same task, the first task left out.
Every rate, gain and task is written as it is found, under --work, and found there when the same is asked for again;
the table is made of what there is. `--minutes` stops in time. `--state FILE.tar.gz`, for machines that forget: what is
under --work, unpacked at the start and packed at the end. `--jobs N` works on so many networks and domains at once,
which a GPU that waits for its host is glad of; seconds then are those of a shared machine, and rows say so.

memory: bytes of backward for every method at each batch size and at 100, stated and really held, over full training's
at the same batch and, as the paper has it, over full training's at 100.

greedy: how much of the best plan's worth, found by the integer programme, greedy selection gets.

seconds: what a plan with channels says that a step takes, and what it takes.

layers: seconds of each layer's backward with a quarter of its channels over dense, both in plain blocks that take
turns; medians. What the plans' speed rests on.

metatrain: as `elastictrainer metatrain`, for every network at once; `--meta DIR` is where the runs go.
pack: one archive of images, networks and packages for a machine that has none of them (`tiny_inputs.py`).

On a lent GPU (one H200, 16 cores, no network, bare each time, 64 MiB carried, 10 minutes a call, files back of 16 MiB
at the most); minutes are reckoned, none of it has been run there:

1. Here: an archive of 26 MiB, to be carried.
    python benchmarks/tinytrain.py pack --models mobilenet_v2,builtin --domains "" --out carry/tiny.zip \
        --data ../shared/data --weights ../shared/weights
2. There, 6 minutes: meta-training, and every method once on the device. 9 and 13.1 MiB of weights come back.
    python3 -m zipfile -e carry/tiny.zip /tmp/tiny; export PYTHONPATH=src:/tmp/tiny/lib COMMIT=...
    python3 benchmarks/tinytrain.py metatrain --models mobilenet_v2,builtin --device cuda --jobs 2 --minutes 8 \
        --data /tmp/tiny/data --weights /tmp/tiny/weights --meta /tmp/meta
    for m in mobilenet_v2 builtin; do mkdir -p $OUT/meta/$m; \
        cp /tmp/meta/$m/{model.safetensors,metrics.jsonl,result.json} $OUT/meta/$m/; done
    python3 benchmarks/tinytrain.py episodes --models mobilenet_v2,builtin --device cuda --jobs 16 --minutes 2 \
        --data /tmp/tiny/data --weights /tmp/tiny/weights --domains tinyimagenet100 --episodes 2 --steps 2 --lrs 1e-3 \
        --tune-episodes 1 --search-episodes 1 --search-steps 1 --batch-sizes 25 --work /tmp/smoke --out $OUT/smoke.csv
3. Here, META being the folder meta/ that came back: an archive of 54 MiB.
    python benchmarks/tinytrain.py pack --models mobilenet_v2,builtin --per-class 20 --out carry/tiny.zip \
        --data ../shared/data --weights ../shared/weights --meta META
4. There, 9 minutes, three times; put the tiny.tar.gz that comes back into carry/ each time.
    python3 -m zipfile -e carry/tiny.zip /tmp/tiny; export PYTHONPATH=src:/tmp/tiny/lib COMMIT=...
    cp carry/tiny.tar.gz $OUT/ 2>/dev/null; python3 benchmarks/tinytrain.py episodes --device cuda --jobs 20 \
        --models mobilenet_v2,builtin --batch-sizes 25 --steps 20 --tune-episodes 5 --search-episodes 3 \
        --search-steps 5 --data /tmp/tiny/data --weights /tmp/tiny/weights --meta /tmp/tiny/meta --minutes 8 \
        --work /tmp/work --state $OUT/tiny.tar.gz --out $OUT/tinytrain_episodes_cuda.csv
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from elastictrainer.data.episodes import Episode, Episodes
from elastictrainer.errors import BudgetError, TrainingError
from elastictrainer.fewshot.heads import Prototypes, Queries, last_linear
from elastictrainer.fewshot.interval import Mean
from elastictrainer.fewshot.learner import Learner, Outcome, Settings
from elastictrainer.fewshot.meta import held_out, meta_train
from elastictrainer.fewshot.methods import Ceilings, Method, find_method
from elastictrainer.fewshot.protocol import run_episodes, summarise
from elastictrainer.fewshot.search import Gains, contributions, evolve
from elastictrainer.importance.potential import channel_norms
from elastictrainer.plan import Plan
from elastictrainer.runtime.apply import apply
from elastictrainer.runtime.optimizers import make_optimizer

sys.path.insert(0, str(Path(__file__).parent))
from common import RESULTS, print_table, where, write_csv
from tiny_costs import greedy_suite, layers_suite, memory_suite, seconds_suite
from tiny_inputs import bank_of, network, pack_suite

LATE = 75  # the exit status of a process that ran out of time
Row = dict[str, Any]


class OutOfTime(Exception):
    """`--minutes` are over; what was found is written."""


class Notes:
    """A file of JSON lines, each written as it is found; those of an earlier run of the same settings are read.

    Nothing is written before something is added: several processes read what one of them found.
    """

    def __init__(self, path: Path, facts: Row, until: float) -> None:
        self.path, self.facts, self.until = path, facts, until
        first, *lines = _whole_lines(path) or [{}]
        self.lines: list[Row] = lines if first == facts else []
        self._begun = False

    def _begin(self) -> None:
        """The file as it was read, without half a line that a kill left, or anew."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_suffix(".tmp")
        aside.write_text("".join(json.dumps(line) + "\n" for line in (self.facts, *self.lines)), encoding="utf-8")
        aside.replace(self.path)
        self._begun = True

    def find(self, **about: Any) -> Row | None:
        return next((line for line in self.lines if about.items() <= line.items()), None)

    def add(self, line: Row) -> None:
        if not self._begun:
            self._begin()
        self.lines.append(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.check()

    def check(self) -> None:
        if time.monotonic() > self.until:
            raise OutOfTime


def _whole_lines(path: Path) -> list[Row]:
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


# Network, meta-trained, batch size, domain: what one process works on. Instead of a domain, the method to be tuned.
Cell = tuple[str, bool, int, str]
TUNE = "tune "


def episodes_suite(args: argparse.Namespace) -> None:
    if args.state and args.state.exists():
        with tarfile.open(args.state) as archive:  # what lies there is newer: it was written after the last packing
            for member in archive.getmembers():
                if member.isfile() and not (args.work / member.name).exists():
                    archive.extract(member, args.work, filter="data")
    networks = [
        (name, meta, size)
        for name in args.models.split(",")
        for meta in ((False, True) if args.meta else (False,))
        for size in map(int, args.batch_sizes.split(","))
    ]
    # First what every domain of a network needs, then the domains; SparseUpdate searches at TinyTrain's rate.
    methods = args.methods.split(",")
    tuned = [[m for m in methods if m != "sparse_update"], [m for m in methods if m == "sparse_update"]]
    first = [[(*network, TUNE + method) for method in wave for network in networks] for wave in tuned]
    then: list[Cell] = [(*network, domain) for network in networks for domain in args.domains.split(",")]
    try:
        for cells in (*first, then):
            cells = [cell for cell in cells if not is_done(cell, args)]
            if args.jobs > 1:
                _side_by_side(cells, args)
            else:
                for cell in cells:
                    work_on(cell, args)
                    _write_table(then, args)
    except OutOfTime:
        print("out of time; run it again to go on", file=sys.stderr)
    finally:
        _write_table(then, args)
        if args.state:
            args.state.parent.mkdir(parents=True, exist_ok=True)
            with tarfile.open(args.state, "w:gz") as archive:
                archive.add(args.work, arcname=".")


def _side_by_side(cells: list[Cell], args: argparse.Namespace, *, patience_s: float = 20.0) -> None:
    """Each in a process of its own, `--jobs` at a time. When time is up they stop by themselves, or are stopped."""
    waiting, running = list(cells), {}
    while waiting or running:
        while waiting and len(running) < args.jobs and time.monotonic() < args.until:
            cell = waiting.pop(0)
            left = (args.until - time.monotonic()) / 60
            command = [sys.executable, __file__, *sys.argv[1:], "--cell", json.dumps(cell), "--minutes", f"{left:.3f}"]
            running[subprocess.Popen(command)] = cell
        for process in [p for p in running if p.poll() is not None]:
            cell = running.pop(process)
            if process.returncode not in (0, LATE):
                print(f"failed: {cell}", file=sys.stderr)
        if time.monotonic() > args.until + patience_s:
            for process in running:
                process.kill()  # what it found is written
        if time.monotonic() > args.until and not running:
            raise OutOfTime
        time.sleep(0.2)


def _write_table(cells: list[Cell], args: argparse.Namespace) -> None:
    rows = [row for cell in cells for row in table_rows(cell, args)]
    if rows:
        write_csv(args.out, rows)
        shown = ("model", "meta", "batch_size", "domain", "method", "episodes", "accuracy", "half", "backward_share")
        print_table(rows, (*shown, "versus_full"))


def notes_of(cell: Cell, args: argparse.Namespace) -> Notes:
    """Of a network and method what was tuned for it; of a domain its tasks."""
    name, meta, size, domain = cell
    told = ("source", "varied", "head", "ways", "shots", "steps", "optimizer", "lrs", "memory", "compute",
            "image_size", "seed", "tune_episodes", "search_episodes", "search_steps", "device")  # fmt: skip
    facts = {"model": name, "meta": meta, "batch_size": size, "domain": domain} | {k: getattr(args, k) for k in told}
    if meta:  # a network trained anew is another one
        facts["weights"] = hashlib.sha256((args.meta / name / "model.safetensors").read_bytes()).hexdigest()[:16]
    file = f"{name}-{'meta' if meta else 'plain'}-{size}-{domain.replace(' ', '-')}.jsonl"
    return Notes(args.work / file, facts, args.until)


def rate_of(cell: Cell, method: str, args: argparse.Namespace) -> Row | None:
    """What tuning found, None before it ended; the rate in it is None where nothing fits the ceilings."""
    if method == "none":
        return {"rate": float(args.lrs.split(",")[0])}
    return notes_of((*cell[:3], TUNE + method), args).find(kind="rate")


def is_done(cell: Cell, args: argparse.Namespace) -> bool:
    """So that no process has to start, and read its images, to find nothing to do."""
    methods = args.methods.split(",")
    if cell[3].startswith(TUNE):
        return rate_of(cell, cell[3].removeprefix(TUNE), args) is not None
    rates = {method: rate_of(cell, method, args) for method in methods}
    made = {(line["episode"], line["method"]) for line in notes_of(cell, args).lines if "episode" in line}
    wanted = [method for method, found in rates.items() if found is None or found["rate"] is not None]
    return all((index, method) in made for index in range(args.episodes) for method in wanted)


def work_on(cell: Cell, args: argparse.Namespace) -> None:
    name, meta, batch_size, domain = cell
    loaded = network(name, args, meta=meta)
    loaded.model.to(args.device)
    head = Prototypes(last_linear(loaded.model, loaded.head))
    settings = Settings(
        steps=args.steps, optimizer=args.optimizer, batch_size=batch_size, seed=args.seed, head=args.head
    )
    ceilings = Ceilings(args.memory, args.compute)
    if domain.startswith(TUNE):
        bank = bank_of(args.source, loaded, args)
        source = Learner(loaded.model, head, bank, settings=settings, ceilings=ceilings)
        prepare(source, cell, args)
        return
    known = {method: rate_of(cell, method, args) for method in args.methods.split(",")}
    missing = [method for method, found in known.items() if found is None]
    if missing:
        print(f"{name}: not yet tuned: {', '.join(missing)}", file=sys.stderr)
        raise OutOfTime
    rates = {method: found["rate"] for method, found in known.items() if found is not None}
    found = (
        notes_of((*cell[:3], f"{TUNE}sparse_update"), args).find(kind="scheme") if "sparse_update" in rates else None
    )
    scheme = None if found is None else Plan.from_json(found["plan"])
    methods = [method for method in args.methods.split(",") if rates[method] is not None]
    bank = bank_of(domain, loaded, args)
    learner = Learner(loaded.model, head, bank, settings=settings, ceilings=ceilings, scheme=scheme)
    tasks = Episodes(bank.labels, **_shape(args), seed=args.seed)
    notes = notes_of(cell, args)
    for method in methods:
        if notes.find(kind="peak", method=method) is None:
            notes.add(
                {
                    "kind": "peak", "method": method, "peak_bytes": peak_bytes(learner, method, tasks.episode(0)),
                    "full_bytes": learner.plain.full.nbytes, "image_size": loaded.image_size, "rate": rates[method],
                    "images": len(bank.labels),
                    **where(args.device), "jobs": args.jobs,
                }
            )  # fmt: skip
    done = [line for line in notes.lines if "episode" in line]
    run_tuned(learner, methods, rates, tasks, args.episodes, done=done, on_row=notes.add)


def _shape(args: argparse.Namespace) -> dict[str, Any]:
    return {"ways": None, "shots": None} if args.varied else {"ways": args.ways, "shots": args.shots}


def prepare(source: Learner, cell: Cell, args: argparse.Namespace) -> None:
    """The learning rate of a method, and SparseUpdate's scheme, on tasks of the source's held-out classes."""
    method, notes = cell[3].removeprefix(TUNE), notes_of(cell, args)
    if notes.find(kind="rate") is not None:
        return
    unseen = held_out(len(source.bank.classes))[1]
    tasks = Episodes(source.bank.labels, **_shape(args), seed=args.seed + 1, only=unseen)
    rate: float | None
    try:
        if method == "sparse_update":
            known = rate_of(cell, "tinytrain", args) if "tinytrain" in args.methods.split(",") else None
            source.settings = replace(source.settings, lr=(known and known["rate"]) or source.settings.lr)
            source.scheme = scheme_of(source, notes, tasks, args)
        rate = tune(source, method, tasks, args, notes)
    except BudgetError as error:  # nothing of it fits: no row, and the others go on
        print(f"{notes.path.stem}: {error}", file=sys.stderr)
        rate = None
    notes.add({"kind": "rate", "method": method, "rate": rate})


def scheme_of(source: Learner, notes: Notes, tasks: Episodes, args: argparse.Namespace) -> Plan:
    """As `find_scheme`, every gain written as it is found."""
    found = notes.find(kind="scheme")
    if found is not None:
        return Plan.from_json(found["plan"])
    norms = channel_norms(source.model, [layer.weight for layer in source.prices.layers])
    gained: Gains = {(line["weight"], line["share"]): line["gain"] for line in notes.lines if line["kind"] == "gain"}
    settings = source.settings
    source.settings = replace(settings, steps=args.search_steps)
    try:
        gains = contributions(
            source, tasks, args.search_episodes, norms=norms, known=gained,
            on_gain=lambda weight, share, gain: notes.add(
                {"kind": "gain", "weight": weight, "share": share, "gain": gain}
            ),
        )  # fmt: skip
    finally:
        source.settings = settings
    plan = evolve(source.prices, gains, norms=norms, ceilings=source.ceilings, seed=settings.seed)
    notes.add({"kind": "scheme", "plan": plan.to_json()})
    return plan


def table_rows(cell: Cell, args: argparse.Namespace) -> list[Row]:
    """The rows of a domain, of whatever tasks there are by now."""
    name, meta, batch_size, domain = cell
    notes = notes_of(cell, args)
    found = [line for line in notes.lines if "episode" in line]
    full_s = {row["episode"]: row["decide_s"] + row["steps_s"] for row in found if row["method"] == "full"}
    rows: list[Row] = []
    for summary in summarise(found):
        own = [row for row in found if row["method"] == summary.method]
        ratios = [(r["decide_s"] + r["steps_s"]) / full_s[r["episode"]] for r in own if r["episode"] in full_s]
        ratios = [ratio for ratio in ratios if not math.isnan(ratio)]
        about = dict(notes.find(kind="peak", method=summary.method) or {})
        told = {key: about.get(key) for key in ("device", "threads", "torch", "python", "commit", "jobs")}
        rows.append(
            {
                **told, "seed": args.seed, "model": name, "meta": meta, "domain": domain,
                "method": summary.method, "episodes": summary.accuracy.count, "steps": args.steps,
                "optimizer": args.optimizer, "head": args.head, "lr": about.get("rate"), "batch_size": batch_size,
                "image_size": about.get("image_size"), "images": about.get("images"), **_shape(args),
                "accuracy": summary.accuracy.mean, "half": summary.accuracy.half,
                "memory": args.memory, "compute": args.compute,
                "backward_bytes": summary.backward_bytes, "full_bytes": about.get("full_bytes"),
                "backward_share": summary.backward_share, "remembered_bytes": summary.remembered_bytes,
                "decide_s": summary.decide_s, "steps_s": summary.steps_s,
                "versus_full": statistics.median(ratios[1:] or ratios) if ratios else None,
                "peak_bytes": about.get("peak_bytes"),
            }
        )  # fmt: skip
    return rows


def tune(learner: Learner, method: str, tasks: Episodes, args: argparse.Namespace, notes: Notes) -> float:
    """The learning rate that does best on tasks of the source domain."""
    rates = [float(rate) for rate in args.lrs.split(",")]
    if method == "none" or len(rates) == 1:
        return rates[0]
    means = []
    for rate in rates:
        known = notes.find(kind="tuned", method=method, at=rate)
        if known is None:
            learner.settings = replace(learner.settings, lr=rate)
            try:
                found = run_episodes(
                    learner, [find_method(method)], tasks, args.tune_episodes, on_row=lambda row: notes.check()
                )
                mean = Mean.of([row["accuracy"] for row in found]).mean
            except TrainingError:  # it diverges, which is an answer
                mean = 0.0
            known = {"kind": "tuned", "method": method, "at": rate, "accuracy": mean}
            notes.add(known)
        means.append(known["accuracy"])
    return rates[means.index(max(means))]


def run_tuned(
    learner: Learner,
    methods: list[str],
    rates: dict[str, float],
    tasks: Episodes,
    count: int,
    *,
    done: list[Row],
    on_row: Callable[[Row], None],
) -> list[dict[str, Any]]:
    """As `run_episodes`, each method at its own rate."""
    solve = learner.solve

    def at_its_rate(method: Any, episode: Episode, index: int) -> Any:
        learner.settings = replace(learner.settings, lr=rates[method.name])
        try:
            return solve(method, episode, index)
        except TrainingError as error:  # no answer is a wrong answer, and the tasks after it go on
            print(f"{method.name}, task {index}: {error}", file=sys.stderr)
            return Outcome(method.name, 0.0, None, (), math.nan, math.nan)

    learner.solve = at_its_rate  # type: ignore[method-assign]
    try:
        found = [find_method(name) for name in methods]
        return run_episodes(learner, found, tasks, count, done=done, on_row=on_row)
    finally:
        learner.solve = solve  # type: ignore[method-assign]


def peak_bytes(learner: Learner, name: str, episode: Episode) -> int | None:
    """CUDA only: what the allocator's peak rises by in one step of one batch, forward, backward and optimizer."""
    if learner.bank.device.type != "cuda":
        return None
    method = find_method(name)
    support = learner.bank.images(episode.support)
    labels = torch.from_numpy(episode.support_labels).to(learner.bank.device)
    with learner.extended(method):
        return _peak(learner, method, episode, support, labels)


def _peak(learner: Learner, method: Method, episode: Episode, support: torch.Tensor, labels: torch.Tensor) -> int:
    plan = learner.plan(method, episode, 0, support, labels)
    if plan is None:
        return 0
    optimizer = make_optimizer(learner.settings.optimizer, learner.model.parameters(), lr=0.0)
    size = learner.settings.batch_size
    batch = Queries(support[:size], labels[:size], learner.head.of(learner.model, support, labels, episode.ways))
    with apply(learner.model, plan, optimizer=optimizer, bits=method.bits):
        for _ in range(2):
            optimizer.state.clear()
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            learner.head.loss(learner.model, batch).backward()
            optimizer.step()
            torch.cuda.synchronize()
            grown = torch.cuda.max_memory_allocated() - before
        optimizer.zero_grad(set_to_none=True)
    return grown


def metatrain_suite(args: argparse.Namespace) -> None:
    """As `elastictrainer metatrain`, which needs packages that a lent machine may not have; all networks at once.

    The last layer is made small: features do not pass it, and it would be a third of what has to travel.
    """
    if args.cell:
        name = args.cell[0]
        loaded = network(name, args, meta=False, classes=2)
        loaded.model.to(args.device)
        head = Prototypes(last_linear(loaded.model, loaded.head))
        meta_train(
            loaded.model, head, bank_of(args.source, loaded, args), out=args.meta / name, resume=True, ways=args.ways,
            shots=args.shots, episodes=args.tasks, epochs=args.epochs, lr=args.meta_lr, seed=args.seed,
            config={"model": loaded.name, "weights": loaded.source}, weights_metadata=loaded.metadata(),
        )  # fmt: skip
        return
    cells: list[Cell] = [(name, False, 0, "") for name in args.models.split(",")]
    try:
        _side_by_side(cells, args, patience_s=0.0)
    except OutOfTime:
        print("out of time; run it again, with what is in --meta, to go on", file=sys.stderr)


SUITES: dict[str, Callable[[argparse.Namespace], None]] = {
    "episodes": episodes_suite,
    "memory": memory_suite,
    "layers": layers_suite,
    "greedy": greedy_suite,
    "seconds": seconds_suite,
    "metatrain": metatrain_suite,
    "pack": pack_suite,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=tuple(SUITES))
    parser.add_argument("--models", default="mobilenet_v2", help="torchvision names, or builtin (EfficientNet-Lite0)")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--meta", type=Path, help="a folder with a run of metatrain for each model")
    parser.add_argument("--source", default="tinyimagenet100")
    parser.add_argument("--domains", default="flowers102,grocery81,omniglot,cub200,pets37")
    parser.add_argument("--methods", default="none,full,last,bias,tinytl,adapterdrop,sparse_update,elastic,tinytrain")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--tune-episodes", type=int, default=10)
    parser.add_argument("--search-episodes", type=int, default=5)
    parser.add_argument("--search-steps", type=int, default=10, help="of the tasks that SparseUpdate's search learns")
    parser.add_argument("--minutes", type=float, default=1e9, help="episodes: stop by then; run again to go on")
    parser.add_argument("--jobs", type=int, default=1, help="episodes: processes at once")
    parser.add_argument("--work", type=Path, default=Path("runs/tinytrain"), help="episodes: what was found so far")
    parser.add_argument("--state", type=Path, help="episodes: a .tar.gz that --work is packed into")
    parser.add_argument("--tasks", type=int, default=100, help="metatrain: in an epoch")
    parser.add_argument("--epochs", type=int, default=30, help="metatrain")
    parser.add_argument("--meta-lr", type=float, default=1e-3, help="metatrain: of SGD")
    parser.add_argument("--per-class", type=int, default=0, help="pack: at most so many images of a class; 0: all")
    parser.add_argument("--cell", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--varied", action="store_true")
    parser.add_argument("--head", default="prototypes", help="or linear")
    parser.add_argument("--ways", type=int, default=5)
    parser.add_argument("--shots", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--lrs", default="1e-4,3e-4,1e-3,3e-3")
    parser.add_argument("--batch-sizes", default="1,25")
    parser.add_argument("--memory", default="1MiB")
    parser.add_argument("--compute", default="15%")
    parser.add_argument(
        "--ceilings", default="1MiB:15%,2MiB:15%,4MiB:15%,4MiB:40%,1MiB:none", help="greedy, seconds: pairs"
    )
    parser.add_argument("--image-size", type=int, default=84)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.until = time.monotonic() + 60 * args.minutes
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.cell:
        if args.jobs > 1 and not args.threads:
            torch.set_num_threads(1)
        try:
            if args.suite == "metatrain":
                metatrain_suite(args)
            else:
                work_on(tuple(args.cell), args)
        except OutOfTime:
            sys.exit(LATE)
        return
    args.out = args.out or RESULTS / f"tinytrain_{args.suite}_{args.device}.csv"
    SUITES[args.suite](args)


if __name__ == "__main__":
    main()
