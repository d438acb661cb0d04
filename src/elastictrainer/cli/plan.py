"""`elastictrainer plan`: a budget in, the best set of tensors out."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from elastictrainer.cli import options
from elastictrainer.cli.app import app
from elastictrainer.cli.files import write_whole
from elastictrainer.cli.output import Output

if TYPE_CHECKING:
    from elastictrainer.plan import Plan
    from elastictrainer.profiling import Profile

__all__ = ["plan", "show"]

_PLAN, _OUTPUT = "Budget and plan", "Output"

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Measure importance on this network: a torchvision or timm name, or 'builtin'.",
        rich_help_panel="Model and data",
    ),
]
Scores = Annotated[
    Path | None,
    typer.Option("--scores", help="A JSON file of importance by tensor name.", rich_help_panel=_PLAN),
]
Effort = Annotated[
    int,
    typer.Option("--effort", min=12, help="About how many full steps a profile may cost.", rich_help_panel="Machine"),
]
ProbeBatches = Annotated[
    int, typer.Option("--probe-batches", min=1, help="Batches that importance is measured on.", rich_help_panel=_PLAN)
]
Why = Annotated[
    list[str] | None,
    typer.Option("--why", help="Say why this tensor is in or out; may be given again.", rich_help_panel=_OUTPUT),
]
By = Annotated[
    Literal["blocks", "tensors"], typer.Option("--by", help="A row a block or a row a tensor.", rich_help_panel=_OUTPUT)
]


@app.command()
def plan(
    model: Model = None,
    weights: options.Weights = None,
    model_options: options.ModelOptions = None,
    normalize: options.Normalize = None,
    data: options.Data = "builtin",
    image_size: options.ImageSize = None,
    batch_size: options.BatchSize = 16,
    optimizer: options.Optimizer = "sgd",
    lr: options.LearningRate = 3e-3,
    importance: options.Importance = "elastic",
    probe_batches: ProbeBatches = 6,
    budget: options.Budget = None,
    memory: options.Memory = None,
    pin: options.Pin = None,
    profile: options.ProfileFile = None,
    scores: Scores = None,
    effort: Effort = 100,
    why: Why = None,
    by: By = "blocks",
    seed: options.Seed = 0,
    device: options.Device = "auto",
    threads: options.Threads = None,
    out: options.OutFile = None,
    as_json: options.Json = False,
) -> None:
    """Choose the tensors worth most within a budget.

    With a profile file alone it needs no model and takes milliseconds: importance comes from --scores, or every tensor
    counts alike. With --model and --data importance is measured, and without --profile the network is profiled first.
    Without --budget the plan may cost half of a full step, unless only --memory limits it. The head is pinned unless
    --pin says otherwise.

    \b
    elastictrainer plan --profile pi.json --budget 0.5x
    elastictrainer plan --profile pi.json --memory 300MiB --scores scores.json --why layer3.0.conv1.weight
    elastictrainer plan --model resnet50 --weights default --data birds/ --budget 12ms --json
    """
    from elastictrainer.cli.machine import prepare
    from elastictrainer.errors import ConfigError
    from elastictrainer.profiling import Profile
    from elastictrainer.selection import select

    if profile is None and model is None:
        raise ConfigError("nothing to plan for: give --profile FILE, --model NAME, or both")
    if scores is not None and model is not None:
        raise ConfigError("--scores and --model both say what tensors are worth; give one of them")
    screen = Output(as_json)
    prices = None if profile is None else Profile.load(profile)
    if model is None:
        assert prices is not None, "one of the two was given"
        worth = dict.fromkeys(prices.names, 1.0) if scores is None else read_scores(scores)
    else:
        from elastictrainer.cli.workload import load, loss_fn
        from elastictrainer.importance import find_importance
        from elastictrainer.profiling import profile as measure
        from elastictrainer.runtime.optimizers import make_optimizer

        where = prepare(device, threads=threads, seed=seed)
        work = load(
            model, data, weights=weights, model_options=model_options, normalize=normalize, image_size=image_size,
            batch_size=batch_size, seed=seed, device=where, progress=not as_json,
        )  # fmt: skip
        for line in work.describe():
            screen.say(line)
        steps = make_optimizer(optimizer, work.model.parameters(), lr=lr)
        if prices is None:
            prices = measure(work.model, loss_fn, work.batch(), optimizer=steps, effort=effort, seed=seed)
        batches = list(islice(work.images.train, probe_batches))
        worth = find_importance(importance).fn(work.model, steps, loss_fn, batches, names=prices.names, seed=seed)
    prices.graph.indices(why or ())  # a name that is not there is refused before anything is printed or written
    made = select(
        prices,
        worth,
        budget=budget if budget is not None or memory is not None else "0.5x",
        memory=memory,
        pin="head" if pin is None else pin,
    )
    if out is not None:
        write(out, made)
    if model is None and scores is None:
        screen.say("every tensor counts alike (give --scores or --model to weigh them)")
    show(screen, made, prices, by=by, why=why or ())


def read_scores(path: Path) -> dict[str, float]:
    """Importance by tensor name, from a JSON object of numbers."""
    import json

    from elastictrainer.errors import ConfigError

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): float(score) for name, score in found.items()}
    except (OSError, AttributeError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(f"cannot read scores from {str(path)!r}: {error}; write a JSON object of numbers") from error


def write(path: Path, plan: Plan) -> None:
    """Write the plan as JSON, whole or not at all."""
    from elastictrainer.errors import ConfigError

    try:
        write_whole(path, plan.to_json() + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write the plan to {str(path)!r}: {error.strerror}") from error


def show(
    screen: Output, plan: Plan, profile: Profile, *, by: str = "blocks", why: list[str] | tuple[str, ...] = ()
) -> None:
    """Print the strip, a table, and the reasons that were asked for; or the plan as JSON."""
    screen.say(str(plan))
    screen.say()
    trained = set(plan.trainable)
    worth = plan.scores or {}
    best = max(profile.lanes, key=lambda lane: lane.fixed_s + lane.reach_s.sum() + lane.train_s.sum())
    own_s = dict(zip(profile.names, best.train_s.tolist()))
    if by == "tensors":
        rows = [
            (name, "trains" if name in trained else "rests", worth.get(name, 0.0), own_s[name] * 1e3)
            for name in plan.names
        ]
        screen.table(("tensor", "plan", "score", "own ms"), rows)
    else:
        blocks = [
            (
                block,
                len(names),
                sum(name in trained for name in names),
                sum(worth.get(name, 0.0) for name in names),
                sum(worth.get(name, 0.0) for name in names if name in trained),
                sum(own_s[name] for name in names if name in trained) * 1e3,
            )
            for block, names in plan.blocks().items()
        ]
        screen.table(("block", "tensors", "train", "score", "of it trained", "own ms"), blocks)
    reasons = [plan.why(name) for name in why]
    for reason in reasons:
        screen.say(str(reason))
    screen.document({**plan.to_dict(), **({"why": {r.name: str(r) for r in reasons}} if reasons else {})})
