"""`elastictrainer train`: fine-tune a network on images within a budget."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from elastictrainer.cli import options
from elastictrainer.cli.app import app
from elastictrainer.cli.output import Output

if TYPE_CHECKING:
    from elastictrainer.runtime.result import Result

__all__ = ["new_folder", "show", "train"]

_DATA, _TRAINING, _PLAN, _OUTPUT = "Model and data", "Training", "Budget and plan", "Output"

Augment = Annotated[
    str | None,
    typer.Option(
        "--augment",
        callback=options.checked(options.read_augment),
        help="none, or flip and one of crop and zoom ('flip,zoom'); else what suits the images.",
        rich_help_panel=_DATA,
    ),
]
ValShare = Annotated[
    float,
    typer.Option(
        "--val-share", min=0.0, max=1.0, help="Share of each class held out of train/ where there is no val/.",
        rich_help_panel=_DATA,
    ),
]  # fmt: skip
WeightDecay = Annotated[
    float, typer.Option("--weight-decay", min=0.0, help="Weight decay, decoupled.", rich_help_panel=_TRAINING)
]
Accumulate = Annotated[
    int, typer.Option("--accumulate", min=1, help="Batches whose gradients make one step.", rich_help_panel=_TRAINING)
]
Clip = Annotated[
    float | None,
    typer.Option("--clip", help="The largest norm of the gradients of what trains.", rich_help_panel=_TRAINING),
]
Schedule = Annotated[
    Literal["cosine", "none"],
    typer.Option("--schedule", help="Learning rate over the run.", rich_help_panel=_TRAINING),
]
EarlyStop = Annotated[
    int | None,
    typer.Option(
        "--early-stop", min=1, help="Stop after so many epochs without a better validation.", rich_help_panel=_TRAINING
    ),
]
ProbeBatches = Annotated[
    int, typer.Option("--probe-batches", min=1, help="Batches that importance is measured on.", rich_help_panel=_PLAN)
]
GradientFrom = Annotated[
    Literal["same", "other", "held-out"],
    typer.Option(
        "--gradient-from",
        help="Importance's gradient: of the batches that make the update, of other ones, or of validation images.",
        rich_help_panel=_PLAN,
    ),
]
RestingState = Annotated[
    Literal["keep", "drop", "offload"],
    typer.Option("--resting-state", help="Optimizer state of tensors that rest.", rich_help_panel=_PLAN),
]
KeepFeatures = Annotated[
    bool,
    typer.Option("--keep/--no-keep", help="adaptive: compute what rests once and keep it.", rich_help_panel=_PLAN),
]
NumberOfViews = Annotated[
    int,
    typer.Option(
        "--views", min=1, help="adaptive: views of each image while features are kept.", rich_help_panel=_PLAN
    ),
]
KeepBytes = Annotated[
    str | None,
    typer.Option(
        "--keep-bytes",
        help="adaptive: most of the device's memory for kept features; by default half of what is free.",
        rich_help_panel=_PLAN,
    ),
]
KeepDisk = Annotated[
    str | None,
    typer.Option("--keep-disk", help="adaptive: most disk for what memory does not hold.", rich_help_panel=_PLAN),
]
KeepAs = Annotated[
    Literal["float16", "bfloat16", "int8", "float32"],
    typer.Option("--keep-as", help="adaptive: how features are stored.", rich_help_panel=_PLAN),
]
KeepWith = Annotated[
    Literal["bf16"] | None,
    typer.Option("--keep-with", help="adaptive: compute features under autocast.", rich_help_panel=_PLAN),
]
Feedback = Annotated[
    bool,
    typer.Option("--feedback/--no-feedback", help="Correct predictions by measured steps.", rich_help_panel=_PLAN),
]
CheckpointEvery = Annotated[
    str,
    typer.Option("--checkpoint-every", help="Time between checkpoints within an epoch.", rich_help_panel=_OUTPUT),
]
Test = Annotated[
    bool,
    typer.Option(
        "--test/--no-test", help="Judge the finished weights on the test images, if there are any.",
        rich_help_panel=_TRAINING,
    ),
]  # fmt: skip
TensorBoard = Annotated[
    bool, typer.Option("--tensorboard", help="Also write TensorBoard's event files.", rich_help_panel=_OUTPUT)
]


@app.command()
def train(
    context: typer.Context,
    model: options.Model = "builtin",
    weights: options.Weights = None,
    model_options: options.ModelOptions = None,
    normalize: options.Normalize = None,
    data: options.Data = "builtin",
    data_cache: options.DataCache = None,
    image_size: options.ImageSize = None,
    augment: Augment = None,
    val_share: ValShare = 0.1,
    batch_size: options.BatchSize = 16,
    epochs: options.Epochs = 12,
    optimizer: options.Optimizer = "sgd",
    lr: options.LearningRate = 3e-3,
    weight_decay: WeightDecay = 0.0,
    schedule: Schedule = "cosine",
    accumulate: Accumulate = 1,
    clip: Clip = None,
    autocast: options.Autocast = None,
    graphs: options.Graphs = True,
    early_stop: EarlyStop = None,
    test: Test = True,
    policy: options.Policy = "adaptive",
    importance: options.Importance = "elastic",
    interval: options.Interval = "3",
    budget: options.Budget = "0.5x",
    memory: options.Memory = None,
    pin: options.Pin = None,
    probe_batches: ProbeBatches = 6,
    gradient_from: GradientFrom = "same",
    bn: options.Norms = None,
    resting_state: RestingState = "keep",
    profile: options.ProfileFile = None,
    feedback: Feedback = True,
    keep: KeepFeatures = True,
    views: NumberOfViews = 2,
    keep_bytes: KeepBytes = None,
    keep_disk: KeepDisk = None,
    keep_as: KeepAs = "float16",
    keep_with: KeepWith = None,
    seed: options.Seed = 0,
    deterministic: options.Deterministic = False,
    device: options.Device = "auto",
    threads: options.Threads = None,
    out: options.Out = None,
    resume: options.Resume = False,
    checkpoint_every: CheckpointEvery = "10min",
    tensorboard: TensorBoard = False,
    as_json: options.Json = False,
) -> None:
    """Fine-tune a network on images within a budget.

    Without options it trains the built-in network on the built-in images at half of full training's time. The budget
    is the run's: a share of what --epochs of full training would take ('0.5x'), or a deadline for everything ('30min').
    With --policy elastic, as published, it is a share of every step, and --epochs are made. Everything about the run is
    left in --out; killed at any moment, it goes on with --resume and the same options.

    \b
    elastictrainer train
    elastictrainer train --model resnet50 --weights default --data birds/ --budget 30min --out runs/birds
    elastictrainer train --model resnet50 --weights default --data birds/ --budget 30min --out runs/birds --resume
    """
    from elastictrainer.cli.config import COMMAND, command
    from elastictrainer.cli.machine import prepare
    from elastictrainer.cli.workload import load, loss_fn
    from elastictrainer.errors import ConfigError
    from elastictrainer.runtime.loop import fit
    from elastictrainer.runtime.optimizers import make_optimizer

    if resume and out is None:
        raise ConfigError("--resume needs --out, the folder of the run to go on with")
    screen = Output(as_json)
    where = prepare(device, threads=threads, seed=seed, deterministic=deterministic)
    work = load(
        model, data, weights=weights, model_options=model_options, normalize=normalize, image_size=image_size,
        augment=augment, val_share=val_share, batch_size=batch_size, seed=seed, device=where, cache_dir=data_cache,
        progress=not as_json,
    )  # fmt: skip
    for line in work.describe():
        screen.say(line)
    result = fit(
        work.model,
        make_optimizer(optimizer, work.model.parameters(), lr=lr, weight_decay=weight_decay),
        loss_fn,
        work.images.train,
        epochs=epochs,
        budget=budget or "1x",
        policy=policy,
        importance=importance,
        interval=interval,
        pin=tuple(pin) if pin else "head",
        probe_batches=probe_batches,
        gradient_from="held_out" if gradient_from == "held-out" else gradient_from,
        memory=memory,
        bn=bn or work.norms,
        resting_state=resting_state,
        val_loader=work.images.val,
        test_loader=work.images.test if test else None,
        scheduler=None if schedule == "none" else schedule,
        accumulate=accumulate,
        clip=clip,
        autocast=autocast,
        graphs=graphs,
        early_stop=early_stop,
        out=out if out is not None else new_folder(Path("runs"), "train"),
        resume=resume,
        checkpoint_every=checkpoint_every,
        seed=seed,
        deterministic=deterministic,
        feedback=feedback,
        keep=keep,
        views=views,
        keep_bytes=keep_bytes,
        keep_disk=keep_disk,
        keep_as=keep_as,
        keep_with=keep_with,
        profile=profile,
        progress=not as_json,
        tensorboard=tensorboard,
        config={**work.config(), COMMAND: command(context)},
        weights_metadata=work.network.metadata(),
    )
    show(screen, result)


def judged(result: Result) -> str:
    """By what: the test data, or as much of it as the time was enough for."""
    share = result.accuracy.get("share")
    return str(result.accuracy["of"]) if share is None else f"by {share:.0%} of {result.accuracy['of']}"


def show(screen: Output, result: Result) -> None:
    from elastictrainer.budget import format_bytes, format_seconds

    accuracy = result.accuracy["final"]
    asked = "-" if result.budget is None else result.budget
    rows: list[tuple[str, Any]] = [
        (f"accuracy ({judged(result)})", "-" if accuracy is None else f"{accuracy:.1%}"),
        ("training", format_seconds(result.train_s)),
        ("of it deciding", format_seconds(sum(result.overhead_s.values()))),
        ("evaluation", format_seconds(result.eval_s)),
        ("budget asked", asked),
        ("ratio got", "-" if result.measured_ratio is None else f"{result.measured_ratio:.3f}x"),
        ("peak memory", "no meter" if result.peak_bytes is None else format_bytes(result.peak_bytes)),
        ("energy", "no meter" if result.energy_j is None else f"{result.energy_j:.0f} J"),
    ]
    screen.say()
    screen.table((result.policy, ""), rows)
    screen.say()
    screen.say(f"everything about this run: {result.folder}")
    screen.document(result.to_dict())


def new_folder(parent: Path, verb: str) -> Path:
    """A folder that is not there yet: runs/train-1, runs/train-2, ..."""
    return next(path for n in count(1) if not (path := parent / f"{verb}-{n}").exists())
