"""Predicted against measured: how well a profile knows what a plan costs.

    python benchmarks/time_model.py --device cpu --threads 1 --batch-size 4 --image-size 96
    python benchmarks/time_model.py --device cuda --batch-size 64 --autocast bf16 --captured --memory

For each model: one profile, then random plans of every depth and density (branches split, since tensors are drawn one
by one), each run for real, interleaved with full steps. Drift of the machine is divided out by those full steps. Beside
our prediction stands the reference implementation's simpler model, fed with the same measured parts: forward taken as a
third of the step, branches flattened to the chain of `named_parameters()`.

On CUDA `--captured` prices and measures steps as `et.fit` runs them there, recorded once and replayed (CUDA graphs);
without it they are eager steps, which at batch 4 wait for their host. `noise` is how far a plan's own repeated ratios
lie apart (half the distance of the outermost, median over plans): no prediction can be closer than its measurement.

Writes results/time_model_plans_*.csv (a row a plan) and results/time_model_*.csv (a row a model) after each model, and
prints the latter. A model that fails is named at the end and the others go on; `--resume` keeps what the tables hold
already of this commit, device and settings, and runs the rest.

On a machine lent by the minute `--minutes 8` bounds a run: each model gets an equal share of what is left and as many
rounds as fit in it (at least one, at most --rounds; `rounds_done` says how many), and a model that would not end in
time is left for `--resume`. The last one may end late, by a minute on a slow machine. A large GPU runs about 200 full
steps a model for the profile and 200 for each round. Without git (a copy of the tree) give the commit as
COMMIT=$(git rev-parse --short HEAD).
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import elastictrainer as et
from elastictrainer.profiling.replays import Replays
from elastictrainer.profiling.steps import Stepper
from elastictrainer.runtime.capture import brief_collections, find_recorder

sys.path.insert(0, str(Path(__file__).parent))
from common import RESULTS, kept_rows, print_table, where, write_csv
from models import CASES, Case, loss_fn

MOST_MEDIAN, MOST_P95 = 0.03, 0.08  # the errors aimed at
MOST_MEMORY = 0.1


class Clock:
    """The time there is for all models: each one's share, and whether another one would still end in time."""

    def __init__(self, whole_s: float | None, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._end = float("inf") if whole_s is None else now() + whole_s
        self._least = 0.0  # the longest that any model took for its profile and one round
        self._start, self._share_end, self._rounds = 0.0, 0.0, 0

    def begins(self, models_left: int) -> bool:
        """Start a model's share, unless there is less than half of what the slowest one so far could not do without."""
        self._start = self._now()
        left = self._end - self._start
        self._share_end, self._rounds = self._start + left / models_left, 0
        return left > self._least / 2

    def another(self, round_s: float) -> bool:
        """After a round that took so long: whether the share has room for one more."""
        now = self._now()
        self._rounds += 1
        if self._rounds == 1:
            self._least = max(self._least, now - self._start)
        return now + round_s < self._share_end


def random_plans(profile: et.Profile, count: int, rng: np.random.Generator) -> list[list[str]]:
    """Every depth and density: the deepest tensor drawn evenly, the ones above it kept with a random probability."""
    plans = []
    for _ in range(count):
        depth = int(rng.integers(1, len(profile.names) + 1))
        kept = rng.random(depth) < rng.random()
        kept[depth - 1] = True
        plans.append([name for name, keep in zip(profile.names, kept) if keep])
    return plans


def chain_prediction(profile: et.Profile, model: nn.Module, names: list[str]) -> float:
    """The published model: forward is a third, and everything above the deepest tensor in module order is passed."""
    lane = max(profile.lanes, key=lambda lane: lane.fixed_s + lane.reach_s.sum() + lane.train_s.sum())
    order = [name for name, _ in model.named_parameters() if name in profile.graph.index][::-1]
    at = {name: i for i, name in enumerate(order)}
    pass_s = np.zeros(len(order))  # each operation's own passing goes to the last tensor that hangs on it
    host = 0
    for node, seconds in zip(profile.graph.nodes, lane.reach_s):
        if node.tensors:
            host = max(at[profile.names[k]] for k in node.tensors)
        pass_s[host] += seconds
    deepest = max(at[name] for name in names)
    own = sum(lane.dw_s[profile.graph.index[name]] for name in names)
    backward = pass_s.sum() + lane.dw_s.sum()
    return profile.full_step_s * (1 / 3 + 2 / 3 * (own + pass_s[:deepest].sum()) / backward)


def call_s(profile: et.Profile, plan: list[str]) -> float:
    """What asking the price of a plan takes: the median of some calls."""
    seconds = []
    for _ in range(9):
        start = time.perf_counter()
        profile.step_s(plan)
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def run_case(case: Case, args: argparse.Namespace, clock: Clock) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    model = case.make().to(device).train()
    batch = tuple(t.to(device) for t in case.batch(args))
    if args.channels_last:
        model = model.to(memory_format=torch.channels_last)
    dtype = {"bf16": torch.bfloat16, "off": None}[args.autocast]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            return loss_fn(model, batch)

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for _ in range(2):  # what the first steps of a process load, training loads once in any case
        loss(model, batch).backward()
    model.zero_grad()
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    profile = et.profile(model, loss, batch, optimizer=optimizer, effort=args.effort, captured=args.captured)
    profile_s = time.perf_counter() - start

    plans = random_plans(profile, args.plans, np.random.default_rng(args.seed))
    stepper = Stepper(model, loss, batch, optimizer, [dict(model.named_parameters())[n] for n in profile.names])
    with et.apply(model, profile.names) as applied, brief_collections():
        stepper.step()  # everything gets its optimizer state

        def train(indices: Any) -> None:
            applied.update([profile.names[k] for k in indices])

        peaks = [_peak(stepper, train, _indices(profile, plan)) if args.memory else 0 for plan in plans]
        recorder = find_recorder(device) if profile.captured else None
        replays = Replays(stepper, train, recorder) if recorder is not None else None
        timer, choose = (stepper, train) if replays is None else (replays, replays.train)
        steps = args.steps or (_steps_of(profile.full_step_s) if cuda else 1)

        def seconds(plan: Any) -> float:
            choose(_indices(profile, plan))
            return min(timer.timed(steps).step_s for _ in range(args.bursts))

        seconds(profile.names)
        ratios: list[list[float]] = [[] for _ in plans]
        fulls: list[float] = []
        for _ in range(args.rounds):
            begun = time.perf_counter()
            before = seconds(profile.names)
            for start in range(0, len(plans), args.group):
                group = [seconds(plan) for plan in plans[start : start + args.group]]
                after = seconds(profile.names)
                fulls.append(after)
                for row, measured in zip(ratios[start : start + args.group], group):
                    row.append(measured / ((before + after) / 2))
                before = after
            if not clock.another(time.perf_counter() - begun):
                break

    full_s = float(np.median(fulls))
    rows: list[dict[str, Any]] = []
    for plan, row, peak in zip(plans, ratios, peaks):
        measured = float(np.median(row))
        predicted = profile.step_s(plan) / profile.full_step_s
        chain = chain_prediction(profile, model, plan) / profile.full_step_s
        rows.append(
            {
                "model": case.name,
                "tensors": len(plan),
                "measured_ratio": measured,
                "noise": (max(row) - min(row)) / 2 / measured if len(row) > 1 else float("nan"),
                "predicted_ratio": predicted,
                "chain_ratio": chain,
                "error": predicted / measured - 1,
                "chain_error": chain / measured - 1,
                "peak_bytes": peak,
                "predicted_bytes": profile.peak_bytes(plan),
            }
        )
    absolute = np.abs([r["error"] for r in rows])
    chain = np.abs([r["chain_error"] for r in rows])
    summary = {
        "model": case.name,
        "batch": args.batch_size,
        "image": args.image_size,
        "tokens_of_text": args.tokens,
        "autocast": args.autocast,
        "tensors": len(profile.names),
        "plans": len(rows),
        "median": float(np.median(absolute)),
        "p95": float(np.quantile(absolute, 0.95)),
        "chain_median": float(np.median(chain)),
        "chain_p95": float(np.quantile(chain, 0.95)),
        "stated_median": profile.error.median,
        "stated_p95": profile.error.p95,
        "noise": float(np.median([r["noise"] for r in rows])),
        "full_noise": float(np.quantile(fulls, 0.9) / np.quantile(fulls, 0.1) - 1),
        "rounds_done": len(ratios[0]),
        "full_step_s": full_s,
        "full_predicted": profile.full_step_s / full_s - 1,
        "profile_steps": profile_s / full_s,
        "step_s_us": 1e6 * float(np.median([call_s(profile, plan) for plan in plans])),
        "lane": max(profile.lanes, key=lambda lane: lane.fixed_s + lane.reach_s.sum() + lane.train_s.sum()).name,
    }
    if args.memory:
        off = np.abs([r["predicted_bytes"] / r["peak_bytes"] - 1 for r in rows])
        summary |= {"memory_median": float(np.median(off)), "memory_p95": float(np.quantile(off, 0.95))}
    return rows, summary


def _indices(profile: et.Profile, plan: Any) -> tuple[int, ...]:
    return tuple(profile.graph.index[name] for name in plan)


def _steps_of(full_step_s: float) -> int:
    """Steps to be timed at once on CUDA: some 50 ms of them, or two."""
    return int(np.clip(round(0.05 / full_step_s), 2, 8))


def _peak(stepper: Stepper, train: Callable[[Any], None], plan: tuple[int, ...]) -> int:
    """What CUDA's allocator holds at most in an eager step, less the stepper's copies of what it does not train."""
    train(plan)
    stepper.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    stepper.step()
    torch.cuda.synchronize()
    state = stepper.optimizer.state if stepper.optimizer else {}
    mine = 0  # the stepper's own: a copy of every parameter, and the state of those that rest
    for ours, copied in stepper.pairs:
        mine += copied.numel() * copied.element_size()
        if not ours.requires_grad and copied in state:
            held = [v for v in state[copied].values() if isinstance(v, torch.Tensor)]
            mine += sum(v.numel() * v.element_size() for v in held)
    return torch.cuda.max_memory_allocated() - mine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--autocast", choices=("off", "bf16"), default="off")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--memory", action="store_true", help="CUDA: the peak of each plan's eager step, too")
    parser.add_argument("--plans", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--group", type=int, default=2, help="plans between two full steps")
    parser.add_argument("--captured", action="store_true", help="CUDA: steps that are recorded once and replayed")
    parser.add_argument("--steps", type=int, default=0, help="steps timed at once; 0: 50 ms of them on CUDA, else 1")
    parser.add_argument("--bursts", type=int, default=1, help="of so many timings the fastest counts")
    parser.add_argument("--minutes", type=float, help="end within this time, with fewer rounds or models if need be")
    parser.add_argument("--tokens", type=int, default=128, help="length of a text")
    parser.add_argument("--effort", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--resume", action="store_true", help="go on from what --out holds")
    args = parser.parse_args()
    names = args.models.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"no such model: {', '.join(unknown)} (there are {', '.join(CASES)})")
    torch.set_num_threads(args.threads)
    same = where(args.device) | {"effort": args.effort, "rounds": args.rounds, "seed": args.seed}
    last = ("_channels_last" if args.channels_last else "") + ("_captured" if args.captured else "")
    tag = f"{args.device}_t{args.threads}_b{args.batch_size}_{args.image_size}px_{args.autocast}{last}"
    plans_file, models_file = args.out / f"time_model_plans_{tag}.csv", args.out / f"time_model_{tag}.csv"
    rows = kept_rows(plans_file, same) if args.resume else []
    summaries = kept_rows(models_file, same | {"plans": args.plans}) if args.resume else []
    done, failed, left = [summary["model"] for summary in summaries], [], []
    rows = [row for row in rows if row["model"] in done]
    todo = [name for name in names if name not in done]
    clock = Clock(None if args.minutes is None else 60 * args.minutes)
    for index, name in enumerate(todo):
        if not clock.begins(len(todo) - index):
            left = todo[index:]
            break
        try:
            plans, summary = run_case(CASES[name], args, clock)
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        rows += [row | same for row in plans]
        summaries.append(summary | same)
        print_table([summary], ["model", "median", "p95", "chain_median", "chain_p95", "full_step_s"])
        write_csv(plans_file, rows)
        write_csv(models_file, summaries)
        if args.device == "cuda":
            torch.cuda.empty_cache()
    columns = [
        "model",
        "median",
        "p95",
        "chain_median",
        "chain_p95",
        "stated_p95",
        "full_predicted",
        "profile_steps",
        "step_s_us",
        "noise",
        "lane",
    ]
    print_table(summaries, columns + (["memory_median", "memory_p95"] if args.memory else []))
    reached = [float(s["median"]) <= MOST_MEDIAN and float(s["p95"]) <= MOST_P95 for s in summaries]
    aim = f"{MOST_MEDIAN:.0%} (median) and {MOST_P95:.0%} (95th percentile)"
    print(f"{sum(reached)} of {len(reached)} models within {aim}")
    if args.memory:
        fits = [float(s["memory_p95"]) <= MOST_MEMORY for s in summaries]
        print(f"peak memory of {sum(fits)} of {len(fits)} models within {MOST_MEMORY:.0%} (95th percentile)")
    if left:
        print(f"left for --resume, for want of time: {', '.join(left)}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; --resume runs these again and keeps the rest")


if __name__ == "__main__":
    main()
