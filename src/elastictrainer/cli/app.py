"""The command line's frame: one typer app on which every verb hangs.

How to add a verb `foo`: write `cli/foo.py`, put its name into `VERBS` below, and that is all.

    from __future__ import annotations

    from elastictrainer.cli import options
    from elastictrainer.cli.app import app
    from elastictrainer.cli.output import Output

    @app.command()
    def foo(model: options.Model, epochs: options.Epochs = 12, as_json: options.Json = False) -> None:
        \"\"\"One line that `elastictrainer --help` shows.

        Then a paragraph that says what it costs, and examples, each on its own line after a `\\b` line:

        \\b
        elastictrainer foo --model resnet50 --epochs 3
        \"\"\"
        import torch  # heavy imports live in the body, so that --help stays fast

        out = Output(as_json)
        out.say("plain words")                            # nothing of this is printed under --json
        out.table(("epoch", "accuracy"), [(1, 0.5)])      # a rich table on a terminal, aligned plain lines in a pipe
        out.document({"accuracy": [0.5]})                 # printed under --json only, the one thing on stdout

What comes for free: `--config file.yaml` and `--debug` on every verb; any `ElasticTrainerError` becomes one line on
stderr with its exit code; so does every other exception (exit code 1). So a verb raises, and never prints an error or
calls `sys.exit`. A verb that ends badly without an error (a check that did not pass) raises `typer.Exit(1)`.

Options shared by several verbs are `Annotated` aliases in `cli/options.py`, with or without a default here; their
spelling on the command line, and hence the key in the YAML file, is fixed there and not by the name of the argument.
`cli.machine.prepare(device, threads=, seed=, deterministic=)` makes those four options true and returns the device.
An option that only one verb has is declared in its module with `typer.Option` in the same way.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import typer

from elastictrainer.cli import options

__all__ = ["VERBS", "App", "app", "load_verbs"]

VERBS = ("train", "adapt", "fewshot", "metatrain", "profile", "plan", "compare", "report", "ls", "doctor")

Verb = TypeVar("Verb", bound=Callable[..., Any])


class App(typer.Typer):
    """A typer app whose every command also takes `--config` and `--debug`, without the command knowing."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Verb], Verb]:
        register = super().command(name, **settings)

        def decorate(verb: Verb) -> Verb:
            register(_with_common_options(verb))
            return verb

        return decorate


def _with_common_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    # Typer reads a function's signature and hints, so the two options are added to both and dropped before the call.
    # Their effect is in their callbacks, which run while the command line is parsed.
    common: dict[str, Any] = {"config": options.Config, "debug": options.Debug}
    # Not typing.get_type_hints: on Python 3.10 it hides an Annotated that has None as its default in an Optional.
    signature = inspect.signature(verb, eval_str=True)
    parameters = [
        *signature.parameters.values(),
        inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=options.Config),
        inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=options.Debug),
    ]

    @functools.wraps(verb)
    def wrapped(**arguments: Any) -> Any:
        return verb(**{key: value for key, value in arguments.items() if key not in common})

    wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapped.__doc__ = _flowing(inspect.getdoc(verb) or "")
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapped


def _flowing(text: str) -> str:
    """A paragraph on one line, for the terminal to break where it ends: newer typers keep the source's line breaks."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(p if p.startswith("\b") else " ".join(p.split()) for p in paragraphs)


app = App(
    name="elastictrainer",
    no_args_is_help=True,
    add_completion=False,
    # Boxes and colours are for a terminal; a pipe or a file gets plain help.
    rich_markup_mode="rich" if sys.stdout.isatty() else None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root(version: options.Version = False) -> None:
    """Fine-tune a pretrained network within the time, memory and energy you have.

    Every option of a verb is also a key of one YAML file, given with --config; what stands on the command line wins.
    """


def load_verbs() -> None:
    """Import the modules of all verbs, which registers them; what they need to run is imported when they run."""
    for verb in VERBS:
        importlib.import_module(f"elastictrainer.cli.{verb}")
