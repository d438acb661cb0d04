"""The options that verbs share: one spelling, one help text and one check for each, whatever verb takes it.

A check here refuses what can never be right (a budget that is no budget, a policy that does not exist) while the
command line or the YAML file is read, before anything is loaded. Whether it fits the model and the data is the
library's to say.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from elastictrainer import budget as budgets
from elastictrainer.cli import config as config_file
from elastictrainer.errors import ElasticTrainerError

__all__ = [
    "Autocast",
    "BatchSize",
    "Budget",
    "Config",
    "Data",
    "DataCache",
    "Debug",
    "Deterministic",
    "Device",
    "Epochs",
    "Graphs",
    "ImageSize",
    "Importance",
    "Interval",
    "Json",
    "LearningRate",
    "Memory",
    "Model",
    "ModelOptions",
    "Normalize",
    "Norms",
    "Optimizer",
    "Out",
    "OutFile",
    "Pin",
    "Policy",
    "ProfileFile",
    "Resume",
    "Seed",
    "Threads",
    "Version",
    "Weights",
    "checked",
    "read_augment",
    "registered",
]


def checked(check: Callable[[str], object]) -> Callable[[str | None], str | None]:
    """A callback that leaves the text as it was written, once the library has been able to read it."""

    def callback(value: str | None) -> str | None:
        if value is not None:
            try:
                check(value)
            except ElasticTrainerError as error:
                raise typer.BadParameter(str(error)) from error
        return value

    return callback


def registered(module: str, registry: str) -> Callable[[str | None], str | None]:
    """A callback that accepts the names of a registry; the registry is imported only when a name is to be checked."""

    def callback(value: str | None) -> str | None:
        if value is not None:
            known: dict[str, Any] = getattr(importlib.import_module(module), registry)
            if value not in known:
                close = difflib.get_close_matches(value, known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise typer.BadParameter(f"{value!r} is not one of {', '.join(known)}{hint}")
        return value

    return callback


def _read_interval(text: str) -> object:
    from elastictrainer.runtime.interval import Interval

    return Interval.parse(text)


def read_augment(text: str) -> object:
    from elastictrainer.data import Augment

    return Augment.parse(text)


def _print_version(wanted: bool) -> None:
    if wanted:
        from elastictrainer import __version__

        typer.echo(f"elastictrainer {__version__}")
        raise typer.Exit


def _set_debug(context: typer.Context, value: bool) -> bool:
    # The object is `cli.main`'s own; it is absent when a test drives the app without `main`.
    if value and isinstance(context.obj, dict):
        context.obj["debug"] = True
    return value


_MODEL, _TRAINING, _BUDGET, _MACHINE, _OUTPUT = "Model and data", "Training", "Budget and plan", "Machine", "Output"

Model = Annotated[
    str,
    typer.Option(
        "--model", help="A torchvision or timm name, or 'builtin'; `ls models` lists them.", rich_help_panel=_MODEL
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        help="'default' (the library's own download), a .safetensors or .pth file, or a recipe (.yaml) that names one.",
        rich_help_panel=_MODEL,
    ),
]
ModelOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--model-options",
        help="What the weights need, for example 'type:BatchNorm2d.eps=1e-3'; may be given again.",
        rich_help_panel=_MODEL,
    ),
]
Normalize = Annotated[
    str | None,
    typer.Option(
        "--normalize", help="imagenet, inception, none or MEAN/STD; else the model's own.", rich_help_panel=_MODEL
    ),
]
Data = Annotated[
    str,
    typer.Option(
        "--data",
        help="A folder with train/ (val/, test/), 'torchvision:CIFAR10' and its like, or 'builtin'.",
        rich_help_panel=_MODEL,
    ),
]
DataCache = Annotated[
    Path | None,
    typer.Option(
        "--data-cache",
        help="Keep decoded images in a file in this folder; the next run decodes nothing.",
        rich_help_panel=_MODEL,
    ),
]
ImageSize = Annotated[
    int | None,
    typer.Option(
        "--image-size",
        min=1,
        help="Side of the square images, in pixels; else the model's own.",
        rich_help_panel=_MODEL,
    ),
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Images in a step.", rich_help_panel=_TRAINING)]
Epochs = Annotated[
    int, typer.Option("--epochs", min=1, help="Passes over the training data.", rich_help_panel=_TRAINING)
]
Optimizer = Annotated[
    str,
    typer.Option(
        "--optimizer",
        callback=registered("elastictrainer.runtime.optimizers", "OPTIMIZERS"),
        help="sgd (momentum 0.9, decoupled decay), adam or adamw.",
        rich_help_panel=_TRAINING,
    ),
]
Autocast = Annotated[
    Literal["bf16", "fp16"] | None,
    typer.Option("--autocast", help="Half precision where it is safe.", rich_help_panel=_TRAINING),
]
Graphs = Annotated[
    bool,
    typer.Option(
        "--graphs/--no-graphs", help="On CUDA, steps are recorded once and replayed.", rich_help_panel=_TRAINING
    ),
]
LearningRate = Annotated[float, typer.Option("--lr", min=0.0, help="Learning rate.", rich_help_panel=_TRAINING)]
Norms = Annotated[
    Literal["frozen", "track", "with_owner"] | None,
    typer.Option(
        "--bn",
        help="What running statistics of norm layers do; else frozen, for the built-in images track.",
        rich_help_panel=_BUDGET,
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        "--policy",
        callback=registered("elastictrainer.policies", "POLICIES"),
        help="What decides which tensors train; `ls policies` lists them.",
        rich_help_panel=_BUDGET,
    ),
]
Importance = Annotated[
    str,
    typer.Option(
        "--importance",
        callback=registered("elastictrainer.importance", "IMPORTANCES"),
        help="How a tensor's worth is measured; `ls importances` lists them.",
        rich_help_panel=_BUDGET,
    ),
]
Interval = Annotated[
    str,
    typer.Option(
        "--interval",
        callback=checked(_read_interval),
        help="How long a plan stands before the next probe: epochs ('3'), '500steps' or 'auto'.",
        rich_help_panel=_BUDGET,
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        callback=checked(budgets.Budget.parse),
        help="A share of full training ('0.5x') or a time ('30min', '12ms').",
        rich_help_panel=_BUDGET,
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        callback=checked(budgets.parse_bytes),
        help="The most memory a step may take ('800MiB').",
        rich_help_panel=_BUDGET,
    ),
]
Pin = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        help="Tensors that always train: 'head', a name or a pattern ('layer4.*'); may be given again.",
        rich_help_panel=_BUDGET,
    ),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", help="A profile.json taken before, for this model and device.", rich_help_panel=_BUDGET),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of everything random.", rich_help_panel=_MACHINE)]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Bit-identical repeats and resumes; slower kernels on some devices.",
        rich_help_panel=_MACHINE,
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, mps.", rich_help_panel=_MACHINE)]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", min=1, help="CPU threads for torch; torch's own choice if absent.", rich_help_panel=_MACHINE
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="Where to write; an existing run is never overwritten.", rich_help_panel=_OUTPUT),
]
OutFile = Annotated[
    Path | None,
    typer.Option("--out", help="The file to write; one that is there is replaced.", rich_help_panel=_OUTPUT),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Go on from the checkpoint in --out.", rich_help_panel=_OUTPUT),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document on stdout and nothing else.", rich_help_panel=_OUTPUT),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        is_eager=True,
        callback=config_file.merge,
        help="A YAML file with any of these options as keys; the command line wins.",
        rich_help_panel=_OUTPUT,
    ),
]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug",
        is_eager=True,
        callback=_set_debug,
        help="Show the traceback of an error.",
        rich_help_panel=_OUTPUT,
    ),
]
Version = Annotated[
    bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
]
