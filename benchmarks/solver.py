"""The solver: how long it takes, how far from the best it may be, and what the published one does on the same cases.

    OMP_NUM_THREADS=1 python benchmarks/solver.py            # all of it, a quarter of an hour on one core
    OMP_NUM_THREADS=1 python benchmarks/solver.py --quick    # a row of each kind
    OMP_NUM_THREADS=1 python benchmarks/solver.py --resume   # what the table lacks

- chains: lognormal costs, every second tensor light, a quarter of the scores negative; rho is of the backward pass.
  Costs are whole numbers (some 5,000 in all for 1,000 tensors), so that the published dynamic programme, which rounds
  down, is run on them as they are and keeps the budget. `select` chooses its own resolution; then 1,000 cells.
- models: the profiles of the time-model suite, taken here, at random scores of the same kind; `select` in time, in
  memory and in both (once at half of full training's memory, which time alone may keep already, and once a tenth
  under what the best plan in time holds, where both limits decide), beside the integer programme
  (`scipy.optimize.milp`), which proves what is best. Where that is stopped by `--most-s`, its upper bound stands for
  the best: then no plan is as far from it as the row says.

`score_of_best` is importance reached over the best there is; `as_stated` says that a plan lost no more than its `gap`
claims; `over_budget` and `over_memory` are by what share a choice overran its limit (of a chain's backward pass; of the
step or the peak of a model), 0 if it kept it. Times are the median of repeats with the profile at hand: what a re-plan
costs. Writes results/solver.csv after each chain and each model: what fails is named at the end and the rest goes on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

import elastictrainer as et
from elastictrainer.budget import Budget
from elastictrainer.graph import Graph, Node, TensorInfo
from elastictrainer.profiling.profile import Lane, Memory, Residual
from elastictrainer.selection import select
from elastictrainer.selection.milp import select_milp
from elastictrainer.selection.prices import Prices
from elastictrainer.selection.solve import solve

sys.path.insert(0, str(Path(__file__).parent))
from common import RESULTS, kept_rows, print_table, where, write_csv
from models import CASES, Case, loss_fn

Result = TypeVar("Result")
Floats = np.ndarray[Any, np.dtype[np.float64]]
SHOWN = ("instance", "tensors", "rho", "memory", "solver", "ms", "score_of_best", "gap", "over_budget", "over_memory")
MOST_LOST = 0.005  # of the best, to rounding
PROVEN = 1e-5  # the integer programme's own tolerances
BOTH_SHARE = 0.9
BOTH = f"{BOTH_SHARE:g} of what that plan holds"


def timed(run: Callable[[], Result], repeats: int) -> tuple[Result, float]:
    """The result, and the median of its milliseconds."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - start)
    return result, statistics.median(seconds) * 1e3


def random_scores(count: int, rng: np.random.Generator) -> Floats:
    values = rng.lognormal(0.0, 1.0, count)
    return np.where(rng.random(count) < 0.25, -values, values)


def chain(count: int, seed: int) -> tuple[et.Profile, dict[str, float]]:
    rng = np.random.default_rng(seed)
    t_dy, t_dw = rng.lognormal(0.0, 1.0, count), rng.lognormal(0.0, 1.0, count)
    t_dw[1::2] *= 0.05
    t_dy, t_dw = np.ceil(2 * t_dy), np.ceil(2 * t_dw)
    nodes = tuple(Node("Op", "", (i + 1,) if i + 1 < count else (), (i,)) for i in range(count))
    graph = Graph(nodes, tuple(TensorInfo(f"layer{i}.weight", (1,), "float32", 4) for i in range(count)))
    zero = np.zeros(count)
    forward_s = float(t_dy.sum() + t_dw.sum()) / 2
    lane = Lane("cpu", forward_s * 1e-6, 0.0, zero, zero, t_dy * 1e-6, t_dw * 1e-6, zero)
    none = np.zeros(count, dtype=np.int64)
    profile = et.Profile(graph, (lane,), Memory(0, (), none, none), Residual(0.0, 0.0, 0))
    return profile, dict(zip(profile.names, random_scores(count, rng).tolist()))


def published(t_dy: Floats, t_dw: Floats, scores: Floats, limit: int) -> list[int]:
    """The published recurrence (ElasticTrainer section 6) as the published code reads it, output side first. O(N^2 T).

    With `best[k]` over times for choices among the first k tensors, tensor k is either left out or follows a choice
    that ends at k', and then pays every t_dy from k' on. An entry is built upon only if it took its own tensor; where
    leaving that out was better, any other choice that ends there is forgotten: so optima are lost. The tensor nearest
    the input can never be taken.
    """
    dy, dw = t_dy.astype(int), t_dw.astype(int)
    past = np.flatnonzero(np.cumsum(dy) > limit)
    depth = int(past[0]) if len(past) else len(dy) - 1
    best = np.zeros((depth + 1, limit + 1))
    ends = np.zeros((depth + 1, limit + 1), dtype=bool)
    ends[0] = True
    came_from = np.full((depth + 1, limit + 1), -1)
    for k in range(1, depth + 1):
        best[k] = best[k - 1]
        spent = int(dw[k - 1])
        for before in range(k - 1, -1, -1):
            spent += int(dy[before])
            if spent > limit:
                break
            offered = np.where(
                ends[before, : limit + 1 - spent], best[before, : limit + 1 - spent] + scores[k - 1], -np.inf
            )
            better = offered > best[k, spent:]
            best[k, spent:][better] = offered[better]
            came_from[k, spent:][better] = before
        ends[k] = came_from[k] >= 0
    k, t = np.unravel_index(int(best.argmax()), best.shape)
    chosen: list[int] = []
    while k > 0:
        before = int(came_from[k, t])
        if before < 0:
            k -= 1
            continue
        chosen.append(int(k) - 1)
        t -= dw[k - 1] + dy[before:k].sum()
        k = before
    return chosen[::-1]


def over(cost: float, limit: float) -> float:
    """By what share a cost is beyond its limit; sums of floats are not."""
    return max(cost / limit - 1, 0.0) if cost > limit * (1 + 1e-9) else 0.0


def chain_rows(count: int, rho: float, seed: int, *, repeats: int, with_published: bool) -> list[dict[str, Any]]:
    profile, scores = chain(count, seed)
    lane = profile.lanes[0]
    budget = Budget("seconds", profile.floor_s + rho * (profile.full_step_s - profile.floor_s))
    values = np.asarray(list(scores.values()))
    facts = {"instance": "chain", "tensors": count, "rho": rho, "seed": seed}
    plan, ms = timed(lambda: select(profile, scores, budget=budget), repeats)
    gap = plan.gap or 0.0
    best = (plan.score or 0.0) / (1 - gap)

    def judged(names: Sequence[str]) -> dict[str, Any]:
        backward_s = profile.step_s(names) - profile.floor_s
        reached = sum(scores[name] for name in names) / best
        return {"score_of_best": reached, "over_budget": over(backward_s, budget.value - profile.floor_s)}

    stated = {"optimal": plan.optimal, "gap": gap}
    rows = [{**facts, "solver": "select", "ms": ms, **stated, **judged(plan.trainable)}]

    def at_1000() -> list[str]:
        wanted = [k for k in range(count) if values[k] > 0]
        prices = Prices(profile, wanted, [])
        problem = prices.problem(values[wanted], [prices.clock(lane, budget.value)])
        return prices.names(solve(problem, resolution=1000).chosen)

    names, ms = timed(at_1000, repeats)
    rows.append({**facts, "solver": "1000 cells", "ms": ms, **judged(names)})
    if with_published:
        t_dy, t_dw = np.rint(lane.reach_s * 1e6), np.rint(lane.train_s * 1e6)
        limit = int(rho * (t_dy.sum() + t_dw.sum()))
        chosen, ms = timed(lambda: published(t_dy, t_dw, values, limit), 1)
        rows.append({**facts, "solver": "published", "ms": ms, **judged([profile.names[k] for k in chosen])})
    return rows


def model_rows(case: Case, args: argparse.Namespace) -> list[dict[str, Any]]:
    torch.manual_seed(args.seed)
    model = case.make().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    profile = et.profile(model, loss_fn, case.batch(args), optimizer=optimizer, effort=args.effort)
    full_bytes, base_bytes = profile.peak_bytes(profile.names), profile.memory.base_bytes
    rows = []
    for seed in range(args.seed, args.seed + args.instances):
        scores = dict(zip(profile.names, random_scores(len(profile.names), np.random.default_rng(seed)).tolist()))
        for rho, share in ((0.5, None), (0.7, None), (0.7, 0.5), (None, 0.5), (0.5, BOTH), (0.7, BOTH)):
            facts = {"instance": case.name, "tensors": len(profile.names), "rho": rho, "memory": share, "seed": seed}
            budget = None if rho is None else Budget("ratio", rho)
            memory = None
            if share == BOTH:  # under what the best plan in time alone holds: then both limits decide
                alone = select(profile, scores, budget=budget)
                memory = int(base_bytes + BOTH_SHARE * (alone.peak_bytes - base_bytes))
            elif share is not None:
                memory = int(base_bytes + float(share) * (full_bytes - base_bytes))
            rows += plan_rows(profile, scores, facts, budget=budget, memory=memory, args=args)
    return rows


def plan_rows(
    profile: et.Profile,
    scores: dict[str, float],
    facts: dict[str, Any],
    *,
    budget: Budget | None,
    memory: int | None,
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """The solver, and the integer programme beside it, on one set of scores."""
    try:
        plan, ms = timed(lambda: select(profile, scores, budget=budget, memory=memory), args.repeats)
    except et.BudgetError as refusal:
        return [{**facts, "solver": f"refused: {refusal}"}]
    seconds = None if budget is None else budget.seconds(profile.full_step_s)
    score, gap = plan.score or 0.0, plan.gap or 0.0

    def judged(names: Sequence[str]) -> dict[str, Any]:
        return {
            "over_budget": None if seconds is None else over(profile.step_s(names), seconds),
            "over_memory": None if memory is None else over(profile.peak_bytes(names), memory),
        }

    found = {"optimal": plan.optimal, "gap": gap, **judged(plan.trainable)}
    try:
        (names, bound), milp_ms = timed(
            lambda: select_milp(
                profile, scores, budget_s=seconds, memory_bytes=memory, gap=PROVEN / 10, most_s=args.most_s
            ),
            1,
        )
    except et.BudgetError as stopped:  # it found nothing in time, or holds the memory only within its tolerance
        stated = {"score_of_best": 1 - gap, "as_stated": "not known"}
        return [
            {**facts, "solver": "select", "ms": ms, **found, **stated},
            {**facts, "solver": f"refused: {stopped}"},
        ]
    reached = sum(scores[name] for name in names)
    proven = bound <= reached * (1 + PROVEN)
    best = max(reached if proven else bound, score)
    as_stated = score >= reached * (1 - gap) * (1 - PROVEN) and score <= bound * (1 + PROVEN)
    return [
        {**facts, "solver": "select", "ms": ms, **found, "score_of_best": score / best, "as_stated": as_stated},
        {
            **facts,
            "solver": "integer programme" if proven else "integer programme, stopped",
            "ms": milp_ms,
            "score_of_best": reached / best,
            **judged(names),
        },
    ]


def verdict(rows: Sequence[dict[str, Any]]) -> None:
    """What was aimed at, in a line each: lost to rounding, as stated, within the limits."""
    plans = [row for row in rows if row["solver"] == "select"]
    lost = [1 - float(row["score_of_best"]) for row in plans]
    wrong = [row for row in plans if str(row.get("as_stated", True)) == "False"]
    beyond = [row for row in plans if any(float(row.get(key) or 0) > 0 for key in ("over_budget", "over_memory"))]
    print(
        f"{len(plans)} plans: at most {max(lost, default=0.0):.3%} of the best lost (aim: under {MOST_LOST:.1%}), ",
        end="",
    )
    print(f"{len(wrong)} lost more than their gap states, {len(beyond)} beyond a limit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a row of each kind")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--instances", type=int, default=5, help="random instances of each kind")
    parser.add_argument("--models", nargs="*", help="of the time-model suite; all by default")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--image-size", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--effort", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "solver.csv")
    parser.add_argument("--most-s", type=float, default=60.0, help="seconds after which the integer programme stops")
    parser.add_argument("--resume", action="store_true", help="go on from what --out holds of this commit and device")
    args = parser.parse_args()
    if unknown := [name for name in args.models or () if name not in CASES]:
        parser.error(f"no such model: {', '.join(unknown)} (there are {', '.join(CASES)})")
    torch.set_num_threads(1)
    if args.quick:
        args.repeats, args.instances, args.effort, args.models = 3, 1, 12, args.models or ["resnet50"]
    facts = where() | {"repeats": args.repeats, "instances": args.instances, "effort": args.effort}
    rows = kept_rows(args.out, facts) if args.resume else []
    done = {(row["instance"], str(row["tensors"]), row["rho"], str(row["seed"])) for row in rows}
    done |= {row["instance"] for row in rows if row["instance"] != "chain"}
    work: list[tuple[Any, Callable[[], list[dict[str, Any]]]]] = []
    for count in (1000, 10_000):
        for rho in (0.3, 0.5):
            for seed in range(args.seed, args.seed + args.instances):
                run = partial(chain_rows, count, rho, seed, repeats=args.repeats, with_published=count <= 1000)
                work.append((("chain", str(count), str(rho), str(seed)), run))
    work += [(c.name, partial(model_rows, c, args)) for c in CASES.values() if not args.models or c.name in args.models]
    failed = []
    for what, run in work:
        if what in done:
            continue
        try:
            made = run()
        except Exception:
            traceback.print_exc()
            failed.append(str(what))
            continue
        rows += [{**row, **facts} for row in made]
        write_csv(args.out, rows)
    print_table(rows, SHOWN)
    verdict(rows)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; --resume runs these again and keeps the rest")


if __name__ == "__main__":
    main()
