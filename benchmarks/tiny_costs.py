"""What few-shot plans cost and are worth, nothing trained: bytes held, a layer's seconds, greedy beside the best."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from elastictrainer.backward import BackwardPrices
from elastictrainer.data.episodes import Episode, Episodes
from elastictrainer.errors import BudgetError, ConfigError
from elastictrainer.fewshot.heads import Prototypes, Queries, last_linear
from elastictrainer.fewshot.learner import Learner, Settings
from elastictrainer.fewshot.methods import Ceilings, find_method
from elastictrainer.importance.potential import fisher_potential
from elastictrainer.metrics.held import held_bytes
from elastictrainer.metrics.timing import synchronize
from elastictrainer.plan import Plan
from elastictrainer.profiling import price_backward, time_backward
from elastictrainer.runtime.apply import apply
from elastictrainer.runtime.optimizers import make_optimizer
from elastictrainer.selection import select_channels

sys.path.insert(0, str(Path(__file__).parent))
from common import print_table, where, write_csv
from tiny_inputs import bank_of, network

Row = dict[str, Any]


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


def greedy_suite(args: argparse.Namespace) -> None:
    """How much of the best plan's worth greedy gets, by the paper's own criterion, on tasks of each domain.

    `worth` is the mean over tasks of greedy's over the best's, `worth_least` the least of any task, `as_good` how many
    tasks greedy found nothing better to be had on. Nothing trains, so this says nothing of accuracy.
    """
    rows: list[Row] = []
    for name in args.models.split(","):
        loaded = network(name, args, meta=False)
        head = Prototypes(last_linear(loaded.model.to(args.device), loaded.head))
        for batch_size in map(int, args.batch_sizes.split(",")):
            settings = Settings(optimizer=args.optimizer, batch_size=batch_size, seed=args.seed)
            prices: BackwardPrices | None = None
            for domain in args.domains.split(","):
                bank = bank_of(domain, loaded, args)
                learner = Learner(loaded.model, head, bank, settings=settings, ceilings=Ceilings(None, None))
                prices = prices or learner.prices  # of the shapes alone
                tasks = Episodes(bank.labels, ways=args.ways, shots=args.shots, seed=args.seed)
                potentials = [potential_of(learner, tasks.episode(i), i) for i in range(args.episodes)]
                for memory, compute in ceilings_of(args.ceilings):
                    found = [greedy_and_best(prices, p, memory=memory, compute=compute) for p in potentials]
                    rows.append(
                        {
                            **where(args.device), "seed": args.seed, "model": name, "batch_size": batch_size,
                            "image_size": loaded.image_size, "optimizer": args.optimizer, "domain": domain,
                            "memory": memory, "compute": compute, "episodes": len(found), **together(found),
                        }
                    )  # fmt: skip
            write_csv(args.out, rows)
    shown = ("model", "batch_size", "domain", "memory", "compute", "worth", "worth_least", "as_good", "gap", "best_s")
    print_table(rows, shown)


def ceilings_of(text: str) -> list[tuple[str | None, str | None]]:
    """`1MiB:15%,4MiB:none` as pairs."""
    pairs = [pair.split(":") for pair in text.split(",")]
    return [(None if m == "none" else m, None if c == "none" else c) for m, c in pairs]


def potential_of(learner: Learner, episode: Episode, index: int) -> dict[str, Sequence[float]]:
    """Of every layer, whatever the ceilings: these change here, and a layer that cannot be afforded is in no plan."""
    support = learner.bank.images(episode.support)
    labels = torch.from_numpy(episode.support_labels).to(learner.bank.device)
    prototypes = learner.head.of(learner.model, support, labels, episode.ways)
    views = learner.bank.views(episode.support, index)
    return dict(fisher_potential(learner.model, learner.head.loss, [Queries(views, labels, prototypes)]))


def greedy_and_best(
    prices: BackwardPrices, potential: Mapping[str, Sequence[float]], *, memory: str | None, compute: str | None
) -> Row | None:
    """Both plans of a task, judged by one yardstick that is neither's; None where the ceilings leave nothing."""
    plans, seconds = [], []
    for exact in (False, True):
        start = time.perf_counter()
        try:
            plans.append(select_channels(prices, potential, memory=memory, compute=compute, exact=exact))
        except BudgetError:
            return None
        seconds.append(time.perf_counter() - start)
    greedy, best = (worth_of(plan, potential) for plan in plans)
    return {
        "worth": greedy / best, "gap": plans[1].gap, "greedy_s": seconds[0], "best_s": seconds[1],
        "greedy_layers": sum(name in potential for name in plans[0].trainable),
        "best_layers": sum(name in potential for name in plans[1].trainable),
    }  # fmt: skip


def worth_of(plan: Plan, potential: Mapping[str, Sequence[float]]) -> float:
    """`sum_i s_i * (the chosen channels' part of P_i)`, as `select_channels` has it."""
    scores = plan.scores
    if scores is None:
        raise ConfigError("a plan without scores was chosen by nothing, and so is worth nothing")
    return math.fsum(
        scores[name] * math.fsum(potential[name][row] for row in plan.channels.get(name, range(len(potential[name]))))
        / math.fsum(potential[name])
        for name in plan.trainable
        if name in potential
    )  # fmt: skip


def together(found: Sequence[Row | None]) -> Row:
    solved = [row for row in found if row is not None]
    if not solved:
        return {"solved": 0}
    return {
        "solved": len(solved),
        "worth": statistics.fmean(row["worth"] for row in solved),
        "worth_least": min(row["worth"] for row in solved),
        "as_good": sum(row["worth"] > 1 - 1e-6 for row in solved),
        "gap": max(row["gap"] for row in solved),
        **{
            key: statistics.median(row[key] for row in solved)
            for key in ("greedy_layers", "best_layers", "greedy_s", "best_s")
        },
    }  # fmt: skip


def seconds_suite(args: argparse.Namespace) -> None:
    """What a plan with channels says that a step takes, and what it takes, beside full training in plain PyTorch.

    A step here is forward, backward and optimizer of one batch in a loop of one's own; adaptation (`episodes`) is
    faster, since it runs what comes before the trained layers in a way of its own. In turns, medians.
    """
    rows: list[Row] = []
    for name in args.models.split(","):
        loaded = network(name, args, meta=False)
        model = loaded.model.eval().to(args.device)
        head = Prototypes(last_linear(model, loaded.head))
        bank = bank_of(args.domains.split(",")[0], loaded, args)
        for batch_size in map(int, args.batch_sizes.split(",")):
            settings = Settings(optimizer=args.optimizer, batch_size=batch_size, seed=args.seed)
            learner = Learner(model, head, bank, settings=settings, ceilings=Ceilings(None, None))
            episode = Episodes(bank.labels, ways=args.ways, shots=args.shots, seed=args.seed).episode(0)
            potential = potential_of(learner, episode, 0)
            images = bank.images(episode.support[np.arange(batch_size) % len(episode.support)])
            labels = torch.zeros(batch_size, dtype=torch.int64, device=images.device)
            batch = Queries(images, labels, head.of(model, images[:1], labels[:1], 2))
            optimizer = make_optimizer(args.optimizer, model.parameters(), lr=0.0)
            prices = price_backward(model, head.loss, batch, optimizer=optimizer)
            prices = time_backward(prices, model, head.loss, batch, optimizer=optimizer)
            assert prices.clock is not None
            for memory, compute in ceilings_of(args.ceilings):
                try:
                    plan = select_channels(prices, potential, memory=memory, compute=compute)
                except BudgetError:
                    continue
                full = Plan(prices.profile.names, prices.profile.names, 0.0, 0.0, 0)
                seconds: dict[str, list[float]] = {"full": [], "plan": []}
                for _ in range(args.rounds):
                    for key, standing in (("full", full), ("plan", plan)):
                        seconds[key].append(step_s(model, head.loss, batch, standing, args))
                measured = {key: statistics.median(values) for key, values in seconds.items()}
                part = [w for w in plan.channels if w in prices.by_weight]
                rows.append(
                    {
                        **where(args.device), "seed": args.seed, "model": name, "batch_size": batch_size,
                        "image_size": loaded.image_size, "optimizer": args.optimizer, "memory": memory,
                        "compute": compute, "layers": sum(w in prices.by_weight for w in plan.trainable),
                        "in_part": len(part), "predicted_s": plan.step_s, "measured_s": measured["plan"],
                        "predicted_full_s": plan.full_step_s, "full_s": measured["full"],
                        "predicted_ratio": plan.ratio, "measured_ratio": measured["plan"] / measured["full"],
                        "slower_in_part": sum(v[1] > 1 for v in prices.clock.rows.values()),
                        "of_layers": len(prices.layers),
                    }
                )  # fmt: skip
            write_csv(args.out, rows)
    shown = ("model", "batch_size", "memory", "compute", "layers", "in_part", "predicted_s", "measured_s")
    print_table(rows, (*shown, "predicted_ratio", "measured_ratio", "slower_in_part", "of_layers"))


def step_s(model: nn.Module, loss_fn: Callable[..., torch.Tensor], batch: Any, plan: Plan, args: Any) -> float:
    """Of the median of some steps under a plan, the first left out."""
    optimizer = make_optimizer(args.optimizer, model.parameters(), lr=0.0)
    taken = []
    with apply(model, plan, optimizer=optimizer):
        for _ in range(args.repeats + 1):
            synchronize(args.device)
            start = time.perf_counter()
            loss_fn(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            synchronize(args.device)
            taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])
