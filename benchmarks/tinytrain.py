"""Few-shot adaptation, measured: how accurate, in how many bytes, multiply-adds and seconds, method by method.

    python benchmarks/tinytrain.py episodes --domains flowers102,omniglot --episodes 100 --device cuda \
        --data ../shared/data --weights ../shared/weights [--meta runs/meta]
    python benchmarks/tinytrain.py memory --models mobilenet_v2,builtin --data ../shared/data
    python benchmarks/tinytrain.py layers --threads 1

episodes: every method on every task from the same network, images, views and batch, in turns, beginning with another
one each time. The learning rate of each method is the best of one grid on tasks of the source domain's held-out
classes, never of the domains it is judged on. With `--meta DIR`, again with the weights of `DIR/MODEL` (left there by
`elastictrainer metatrain`). Batch sizes are what backward holds at once; every method has the same. `versus_full` is
the median over tasks of (deciding + training) seconds over full training's on the same task, the first task left out.

memory: bytes of backward for every method at each batch size and at 100, stated and really held, over full training's
at the same batch and, as the paper has it, over full training's at 100.

layers: seconds of each layer's backward with a quarter of its channels over dense, both in plain blocks that take
turns; medians. What the plans' speed rests on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from elastictrainer.data.episodes import Bank, Episode, Episodes
from elastictrainer.data.models import LoadedModel, load_model
from elastictrainer.errors import BudgetError
from elastictrainer.fewshot.heads import Prototypes, Queries, last_linear
from elastictrainer.fewshot.interval import Mean
from elastictrainer.fewshot.learner import Learner, Settings
from elastictrainer.fewshot.meta import held_out
from elastictrainer.fewshot.methods import Ceilings, Method, find_method
from elastictrainer.fewshot.protocol import run_episodes, summarise
from elastictrainer.fewshot.search import find_scheme
from elastictrainer.metrics.held import held_bytes
from elastictrainer.metrics.timing import synchronize
from elastictrainer.plan import Plan
from elastictrainer.runtime.apply import apply
from elastictrainer.runtime.optimizers import make_optimizer

sys.path.insert(0, str(Path(__file__).parent))
from common import RESULTS, print_table, where, write_csv
from workloads import WEIGHTS

DOMAINS = {"cub200": "cub200", "pets37": "pets37"}  # others lie in fewshot/
Row = dict[str, Any]


def network(name: str, args: argparse.Namespace, *, meta: bool) -> LoadedModel:
    if meta:
        return load_model(
            "timm/tf_efficientnet_lite0" if name == "builtin" else f"torchvision/{name}",
            weights=args.meta / name / "model.safetensors",
            image_size=args.image_size,
        )
    if name == "builtin":
        return load_model("builtin", image_size=args.image_size)
    special = dict(WEIGHTS.get(name, {}))
    file = special.pop("file", None)
    weights = args.weights / file if args.weights and file else None
    options = special if weights else {}
    return load_model(f"torchvision/{name}", weights=weights, image_size=args.image_size, **options)


def bank_of(domain: str, like: LoadedModel, args: argparse.Namespace) -> Bank:
    return Bank(
        str(args.data / DOMAINS.get(domain, f"fewshot/{domain}")),
        image_size=like.image_size,
        normalisation=like.normalisation,
        device=args.device,
        seed=args.seed,
    )


def episodes_suite(args: argparse.Namespace) -> None:
    rows: list[Row] = []
    for name in args.models.split(","):
        for meta in (False, True) if args.meta else (False,):
            loaded = network(name, args, meta=meta)
            loaded.model.to(args.device)
            for batch_size in map(int, args.batch_sizes.split(",")):
                for found in one_network(name, loaded, batch_size, meta, args):
                    rows += found
                    write_csv(args.out, rows)
    shown = ("model", "meta", "batch_size", "domain", "method", "accuracy", "half", "backward_share", "versus_full")
    print_table(rows, shown)


def one_network(
    name: str, loaded: LoadedModel, batch_size: int, meta: bool, args: argparse.Namespace
) -> Iterator[list[Row]]:
    """The rows of each domain."""
    head = Prototypes(last_linear(loaded.model, loaded.head))
    settings = Settings(
        steps=args.steps, optimizer=args.optimizer, batch_size=batch_size, seed=args.seed, head=args.head
    )
    ceilings = Ceilings(args.memory, args.compute)
    varied: dict[str, Any] = {"ways": None, "shots": None} if args.varied else {"ways": args.ways, "shots": args.shots}
    source = Learner(loaded.model, head, bank_of(args.source, loaded, args), settings=settings, ceilings=ceilings)
    unseen = held_out(len(source.bank.classes))[1]
    tuning = Episodes(source.bank.labels, **varied, seed=args.seed + 1, only=unseen)
    methods = args.methods.split(",")
    rates = {method: tune(source, method, tuning, args) for method in methods if method != "sparse_update"}
    scheme = None
    if "sparse_update" in methods:
        source.settings = replace(settings, lr=rates.get("tinytrain", settings.lr))
        scheme = find_scheme(source, tuning, args.search_episodes)
        source.scheme = scheme
        rates["sparse_update"] = tune(source, "sparse_update", tuning, args)
    for domain in args.domains.split(","):
        rows: list[Row] = []
        bank = bank_of(domain, loaded, args)
        learner = Learner(loaded.model, head, bank, settings=settings, ceilings=ceilings, scheme=scheme)
        tasks = Episodes(bank.labels, **varied, seed=args.seed)
        found = run_tuned(learner, methods, rates, tasks, args.episodes)
        full_s = {row["episode"]: row["decide_s"] + row["steps_s"] for row in found if row["method"] == "full"}
        for summary in summarise(found):
            own = [row for row in found if row["method"] == summary.method]
            ratios = [(r["decide_s"] + r["steps_s"]) / full_s[r["episode"]] for r in own if r["episode"] in full_s]
            rows.append(
                {
                    **where(args.device), "seed": args.seed, "model": name, "meta": meta, "domain": domain,
                    "method": summary.method, "episodes": summary.accuracy.count, "steps": args.steps,
                    "optimizer": args.optimizer, "head": args.head, "lr": rates[summary.method],
                    "batch_size": batch_size,
                    "image_size": loaded.image_size, "ways": varied["ways"], "shots": varied["shots"],
                    "accuracy": summary.accuracy.mean, "half": summary.accuracy.half,
                    "memory": args.memory, "compute": args.compute,
                    "backward_bytes": summary.backward_bytes,
                    "full_bytes": learner.plain.full.nbytes,
                    "backward_share": summary.backward_share,
                    "remembered_bytes": summary.remembered_bytes,
                    "decide_s": summary.decide_s, "steps_s": summary.steps_s,
                    "versus_full": statistics.median(ratios[1:] or ratios) if ratios else None,
                    "peak_bytes": peak_bytes(learner, summary.method, tasks.episode(0)),
                }
            )  # fmt: skip
            print(f"{name} meta={meta} {domain} {summary.method}: {summary.accuracy}", file=sys.stderr)
        yield rows


def tune(learner: Learner, method: str, tasks: Episodes, args: argparse.Namespace) -> float:
    """The learning rate that does best on tasks of the source domain."""
    rates = [float(rate) for rate in args.lrs.split(",")]
    if method == "none" or len(rates) == 1:
        return rates[0]
    means = []
    for rate in rates:
        learner.settings = replace(learner.settings, lr=rate)
        found = run_episodes(learner, [find_method(method)], tasks, args.tune_episodes)
        means.append(Mean.of([row["accuracy"] for row in found]).mean)
    return rates[means.index(max(means))]


def run_tuned(
    learner: Learner, methods: list[str], rates: dict[str, float], tasks: Episodes, count: int
) -> list[dict[str, Any]]:
    """As `run_episodes`, each method at its own rate."""
    solve = learner.solve

    def at_its_rate(method: Any, episode: Episode, index: int) -> Any:
        learner.settings = replace(learner.settings, lr=rates[method.name])
        return solve(method, episode, index)

    learner.solve = at_its_rate  # type: ignore[method-assign]
    try:
        return run_episodes(learner, [find_method(name) for name in methods], tasks, count)
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


def memory_suite(args: argparse.Namespace) -> None:
    """Bytes and multiply-adds of each method's backward, stated and held, at every batch size. No seconds, no accuracy.

    `versus_full` is at the same batch. `times_less_than_full_100` sets the method at its batch against full training at
    100 images, as the paper's 1,098x does for TinyTrain at 1: most of that is the batch.
    """
    rows: list[Row] = []
    for name in args.models.split(","):
        loaded = network(name, args, meta=False)
        head = Prototypes(last_linear(loaded.model.to(args.device), loaded.head))
        bank = bank_of(args.domains.split(",")[0], loaded, args)
        episode = Episodes(bank.labels, ways=args.ways, shots=args.shots, seed=args.seed).episode(0)
        hundred = 0
        for batch_size in sorted({*map(int, args.batch_sizes.split(",")), 100}, reverse=True):
            settings = Settings(steps=1, optimizer=args.optimizer, batch_size=batch_size, seed=args.seed)
            learner = Learner(loaded.model, head, bank, settings=settings, ceilings=Ceilings(args.memory, args.compute))
            full = learner.plain.full.nbytes
            hundred = hundred or full
            for method in args.methods.split(","):
                if method in ("none", "sparse_update"):
                    continue
                try:
                    row = memory_row(learner, method, episode)
                except BudgetError as error:
                    print(f"{name} {method} at batch {batch_size}: {error}", file=sys.stderr)
                    continue
                rows.append(
                    {
                        **where(args.device), "seed": args.seed, "model": name, "method": method,
                        "batch_size": batch_size, "image_size": loaded.image_size, "optimizer": args.optimizer,
                        "memory": args.memory, "compute": args.compute, **row,
                        "versus_full": row["backward_bytes"] / full,
                        "times_less_than_full_100": hundred / row["backward_bytes"],
                    }
                )  # fmt: skip
            write_csv(args.out, rows)
    shown = ("model", "method", "batch_size", "backward_bytes", "saved_bytes", "held_bytes", "backward_share")
    print_table(rows, (*shown, "versus_full", "times_less_than_full_100"))


def memory_row(learner: Learner, name: str, episode: Episode) -> Row:
    """What the plan states, and the bytes that forward of one batch really saves beside its inputs."""
    method = find_method(name)
    plan = learner.solve(method, episode, 0).plan
    assert plan is not None
    assert plan.backward is not None
    positions = episode.support[np.arange(learner.settings.batch_size) % len(episode.support)]
    images = learner.bank.images(positions)
    labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    with learner.extended(method), apply(learner.model, plan, bits=method.bits):
        prototypes = learner.head.of(learner.model, images[:1], labels[:1], 2)
        held = held_bytes(lambda: learner.head.loss(learner.model, Queries(images, labels, prototypes)), learner.model)
    return {
        "backward_bytes": plan.backward.nbytes, "saved_bytes": plan.backward.saved_bytes,
        "held_bytes": held - prototypes.numel() * prototypes.element_size(),
        "backward_share": plan.backward.macs / learner.plain.full.macs,
    }  # fmt: skip


def layers_suite(args: argparse.Namespace) -> None:
    """Forward of nothing, backward of one layer: weight gradient alone, as for the deepest layer that trains."""
    rows: list[Row] = []
    for name in args.models.split(","):
        loaded = network(name, args, meta=False)
        model = loaded.model.eval().to(args.device)
        for batch_size in map(int, args.batch_sizes.split(",")):
            x = torch.randn(batch_size, 3, loaded.image_size, loaded.image_size, device=args.device)
            for layer, given in inputs_of(model, x).items():
                rows.append(time_layer(model.get_submodule(layer), layer, given, args) | {"model": name})
            write_csv(args.out, rows)
    whole = sum(row["rows_s"] for row in rows) / sum(row["dense_s"] for row in rows)
    slower = sum(row["ratio"] > 1 for row in rows)
    print_table(rows, ("model", "layer", "batch_size", "channels", "groups", "dense_s", "rows_s", "ratio"))
    print(f"all layers together: {whole:.3f} of dense; {slower} of {len(rows)} layers slower")


def inputs_of(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):

            def keep(module: nn.Module, given: Any, name: str = name) -> None:
                found[name] = given[0].detach().clone()

            handles.append(module.register_forward_pre_hook(keep))
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return found


def time_layer(layer: nn.Module, name: str, given: torch.Tensor, args: argparse.Namespace) -> Row:
    channels = layer.weight.shape[0]
    rows = tuple(range(0, channels, 4))
    names = tuple(n for n, _ in layer.named_parameters())
    dense = Plan(names, names, 1.0, 1.0, 0)
    part = Plan(names, names, 1.0, 1.0, 0, channels=dict.fromkeys(names, rows))
    seconds: dict[str, list[float]] = {"dense": [], "rows": []}
    for _ in range(args.rounds):
        for key, plan in (("dense", dense), ("rows", part)):
            with apply(layer, plan):
                seconds[key].append(timed(lambda: layer(given), repeats=args.repeats, device=args.device))
    dense_s, rows_s = (statistics.median(seconds[key]) for key in ("dense", "rows"))
    ratio = statistics.median(b / a for a, b in zip(seconds["dense"], seconds["rows"]))
    return {
        **where(args.device), "seed": args.seed, "layer": name, "batch_size": len(given), "channels": channels,
        "chosen": len(rows), "groups": getattr(layer, "groups", 1), "dense_s": dense_s, "rows_s": rows_s,
        "ratio": ratio,
    }  # fmt: skip


def timed(forward: Callable[[], torch.Tensor], *, repeats: int, device: str) -> float:
    """Seconds of the backward passes, forward apart."""
    outs = [forward() for _ in range(repeats + 1)]
    grad = torch.randn_like(outs[0])
    outs.pop().backward(grad)
    synchronize(device)
    start = time.perf_counter()
    for out in outs:
        out.backward(grad)
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=("episodes", "memory", "layers"))
    parser.add_argument("--models", default="mobilenet_v2", help="torchvision names, or builtin (EfficientNet-Lite0)")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--meta", type=Path, help="a folder with a run of metatrain for each model")
    parser.add_argument("--source", default="tinyimagenet100")
    parser.add_argument("--domains", default="flowers102,grocery81,omniglot,cub200,pets37")
    parser.add_argument("--methods", default="none,full,last,bias,tinytl,sparse_update,elastic,tinytrain")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--tune-episodes", type=int, default=10)
    parser.add_argument("--search-episodes", type=int, default=5)
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
    parser.add_argument("--image-size", type=int, default=84)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    args.out = args.out or RESULTS / f"tinytrain_{args.suite}_{args.device}.csv"
    {"episodes": episodes_suite, "memory": memory_suite, "layers": layers_suite}[args.suite](args)


if __name__ == "__main__":
    main()
