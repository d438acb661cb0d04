"""`elastictrainer adapt`: adapt a network to a few of one's own images within a megabyte."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastictrainer import budget as budgets
from elastictrainer.cli import options
from elastictrainer.cli.app import app
from elastictrainer.cli.output import Output

if TYPE_CHECKING:
    from elastictrainer.fewshot.learner import Outcome

__all__ = [
    "BackwardMemory",
    "Compute",
    "FewShotBatch",
    "FewShotRate",
    "FewShotSteps",
    "Head",
    "Scheme",
    "adapt",
    "check_method",
]

_TRAINING, _PLAN = "Training", "Budget and plan"

Shots = Annotated[
    int,
    typer.Option("--shots", min=1, help="Images of each class to learn from.", rich_help_panel="Model and data"),
]
Compute = Annotated[
    str | None,
    typer.Option(
        "--compute",
        callback=options.checked(budgets.parse_share),
        help="The most multiply-adds backward may take, of full training's ('15%').",
        rich_help_panel=_PLAN,
    ),
]
BackwardMemory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        callback=options.checked(budgets.parse_bytes),
        help="The most that backward may keep: activations, gradients, optimizer state ('1MiB').",
        rich_help_panel=_PLAN,
    ),
]
check_one = options.registered("elastictrainer.fewshot.methods", "METHODS")


def check_method(names: list[str] | None) -> list[str] | None:
    """A callback for `--method` where it may be given again."""
    for name in names or ():
        check_one(name)
    return names


Method = Annotated[
    str,
    typer.Option(
        "--method",
        callback=check_one,
        help="none, full, last, bias, sparse_update, elastic or tinytrain (tinytl, adapterdrop: in fewshot).",
        rich_help_panel=_PLAN,
    ),
]
Scheme = Annotated[
    Path | None,
    typer.Option("--scheme", help="A plan.json that --method sparse_update trains.", rich_help_panel=_PLAN),
]
FewShotSteps = Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps a task.", rich_help_panel=_TRAINING)]
FewShotBatch = Annotated[
    int,
    typer.Option(
        "--batch-size", min=1, help="Images that backward holds at once; gradients of a step add up.",
        rich_help_panel=_TRAINING,
    ),
]  # fmt: skip
Head = Annotated[
    str,
    typer.Option(
        "--head",
        callback=options.registered("elastictrainer.fewshot.heads", "HEADS"),
        help="What answers: prototypes (the nearest class mean) or linear (a layer that begins as these and trains).",
        rich_help_panel=_TRAINING,
    ),
]
FewShotRate = Annotated[float, typer.Option("--lr", help="Learning rate.", rich_help_panel=_TRAINING)]


@app.command()
def adapt(
    model: options.Model = "builtin",
    weights: options.Weights = None,
    model_options: options.ModelOptions = None,
    normalize: options.Normalize = None,
    data: options.Data = "builtin",
    image_size: options.ImageSize = None,
    shots: Shots = 5,
    memory: BackwardMemory = "1MiB",
    compute: Compute = "15%",
    method: Method = "tinytrain",
    scheme: Scheme = None,
    head: Head = "prototypes",
    steps: FewShotSteps = 20,
    batch_size: FewShotBatch = 4,
    optimizer: options.Optimizer = "adam",
    lr: FewShotRate = 1e-3,
    seed: options.Seed = 0,
    deterministic: options.Deterministic = False,
    device: options.Device = "auto",
    threads: options.Threads = None,
    out: options.Out = None,
    as_json: options.Json = False,
) -> None:
    """Adapt a network to a few images of each class.

    Give a folder with a folder of images for each class. --shots of each are learnt from, the others judge what was
    learnt. What trains is chosen once, by what these images say, within the ceilings of --memory and --compute. The run
    folder holds a network that answers with the classes in the order of their names, and what it took.

    \b
    elastictrainer adapt
    elastictrainer adapt --model mobilenet_v2 --weights default --data birds/ --shots 5 --memory 1MiB --compute 15%
    """
    from elastictrainer.cli.machine import prepare
    from elastictrainer.cli.train import new_folder
    from elastictrainer.fewshot.folder import adapt_folder
    from elastictrainer.fewshot.learner import Settings
    from elastictrainer.fewshot.methods import Ceilings

    screen = Output(as_json)
    where = prepare(device, threads=threads, seed=seed, deterministic=deterministic)
    folder = out if out is not None else new_folder(Path("runs"), "adapt")
    result, before, after = adapt_folder(
        model, data, folder, shots=shots, method=method, scheme=scheme, weights=weights, model_options=model_options,
        normalize=normalize, image_size=image_size, device=where, say=screen.say,
        settings=Settings(steps=steps, lr=lr, optimizer=optimizer, batch_size=batch_size, seed=seed, head=head),
        ceilings=Ceilings(memory, compute),
    )  # fmt: skip
    _show(screen, before, after, folder)
    screen.document(result)


def _show(screen: Output, before: Outcome, after: Outcome, folder: Path) -> None:
    from elastictrainer.budget import format_bytes, format_seconds

    rows: list[tuple[str, Any]] = [
        ("accuracy before (prototypes)", f"{before.accuracy:.1%}"),
        ("accuracy after", f"{after.accuracy:.1%}"),
        ("deciding", format_seconds(after.decide_s)),
        ("training", format_seconds(after.steps_s)),
    ]
    plan = after.plan
    if plan is not None and plan.backward is not None and plan.full_backward is not None:
        spent, full = plan.backward, plan.full_backward
        rows += [
            ("backward memory", f"{format_bytes(spent.nbytes)} (everything trained: {format_bytes(full.nbytes)})"),
            ("backward compute", f"{spent.macs / full.macs:.1%} of everything trained"),
            ("trains", f"{len(plan.trainable)} tensors, {len(plan.channels)} in part"),
        ]
    screen.say()
    screen.table((after.method, ""), rows)
    screen.say()
    screen.say(f"everything about this run: {folder}")
