"""`elastictrainer fewshot`: methods compared on many small tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from elastictrainer.cli import options
from elastictrainer.cli.adapt import (
    BackwardMemory,
    Compute,
    FewShotBatch,
    FewShotRate,
    FewShotSteps,
    Head,
    Scheme,
    check_method,
)
from elastictrainer.cli.app import app
from elastictrainer.cli.output import Output

__all__ = ["fewshot"]

_TASKS = "Tasks"

Ways = Annotated[int, typer.Option("--ways", min=2, help="Classes of a task.", rich_help_panel=_TASKS)]
Shots = Annotated[
    int, typer.Option("--shots", min=1, help="Images of a class to learn from.", rich_help_panel=_TASKS)
]  # fmt: skip
Queries = Annotated[
    int, typer.Option("--queries", min=1, help="Images of a class to be judged by.", rich_help_panel=_TASKS)
]
Varied = Annotated[
    bool, typer.Option("--varied", help="Ways and shots vary, as in Meta-Dataset.", rich_help_panel=_TASKS)
]
Count = Annotated[int, typer.Option("--episodes", min=1, help="How many tasks.", rich_help_panel=_TASKS)]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method", callback=check_method, help="A method to compare; may be given again; else all there are.",
        rich_help_panel=_TASKS,
    ),
]  # fmt: skip


@app.command()
def fewshot(
    model: options.Model = "builtin",
    weights: options.Weights = None,
    model_options: options.ModelOptions = None,
    normalize: options.Normalize = None,
    data: options.Data = "builtin",
    image_size: options.ImageSize = None,
    ways: Ways = 5,
    shots: Shots = 5,
    queries: Queries = 10,
    varied: Varied = False,
    episodes: Count = 100,
    method: Methods = None,
    memory: BackwardMemory = "1MiB",
    compute: Compute = "15%",
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
    resume: options.Resume = False,
    as_json: options.Json = False,
) -> None:
    """Compare ways to adapt to a few images, on many small tasks.

    Each task is a few classes of --data with a few images of each; every method learns every task from the same
    network, the same images and the same batch. The classes of --data should be none that the network was trained on. A
    row for each task and method is left in --out, from which --resume goes on.

    \b
    elastictrainer fewshot --episodes 10
    elastictrainer fewshot --model mobilenet_v2 --weights runs/meta/model.safetensors --data flowers/ --varied
    """
    from dataclasses import asdict

    from elastictrainer.cli.machine import prepare
    from elastictrainer.cli.train import new_folder
    from elastictrainer.data.episodes import Bank, Episodes
    from elastictrainer.data.models import load_model
    from elastictrainer.errors import ConfigError
    from elastictrainer.fewshot.folder import read_scheme
    from elastictrainer.fewshot.heads import Prototypes, last_linear
    from elastictrainer.fewshot.learner import Learner, Settings
    from elastictrainer.fewshot.methods import METHODS, Ceilings, find_method
    from elastictrainer.fewshot.protocol import run_episodes, summarise
    from elastictrainer.runtime.result import versions
    from elastictrainer.runtime.run_folder import RunFolder

    if resume and out is None:
        raise ConfigError("--resume needs --out, the folder of the run to go on with")
    screen = Output(as_json)
    where = prepare(device, threads=threads, seed=seed, deterministic=deterministic)
    names = method or [name for name in METHODS if scheme is not None or name != "sparse_update"]
    network = load_model(
        model, weights=weights, image_size=image_size, model_options=model_options, normalize=normalize, seed=seed
    )
    network.model.to(where)
    bank = Bank(
        data, image_size=network.image_size, normalisation=network.normalisation, seed=seed, device=where
    )  # fmt: skip
    tasks = Episodes(
        bank.labels, ways=None if varied else ways, shots=None if varied else shots, queries=queries, seed=seed
    )
    settings = Settings(steps=steps, lr=lr, optimizer=optimizer, batch_size=batch_size, seed=seed, head=head)
    features = Prototypes(last_linear(network.model, network.head))
    ceilings = Ceilings(memory, compute)
    learner = Learner(network.model, features, bank, settings=settings, ceilings=ceilings, scheme=read_scheme(scheme))
    screen.say(str(network))
    screen.say(f"{bank.name} ({bank.split}): {len(bank.classes)} classes, {len(bank.labels)} images")
    config = {
        "verb": "fewshot", "model": network.name, "weights": network.source, "data": bank.name, "split": bank.split,
        "fingerprint": bank.fingerprint, "image_size": bank.image_size, "ways": tasks.ways, "shots": tasks.shots,
        "queries": queries, "memory": memory, "compute": compute, **asdict(settings),
    }  # fmt: skip
    folder = (RunFolder.reopen if resume else RunFolder.create)(
        out if out is not None else new_folder(Path("runs"), "fewshot"), config, environment=versions(where)
    )
    try:
        done = _rows(folder.path)
        folder.write_text("episodes.jsonl", "".join(json.dumps(row) + "\n" for row in done))
        rows = run_episodes(
            learner, [find_method(name) for name in names], tasks, episodes, done=done,
            on_row=lambda row: folder.log("episodes.jsonl", row),
        )  # fmt: skip
        found = summarise(rows)
        document = {"config": config, "methods": [asdict(summary) for summary in found]}
        folder.write_json("result.json", document)
    finally:
        folder.close()
    screen.table(
        ("method", "accuracy", "backward memory", "backward compute", "deciding", "training"),
        [
            (
                s.method, str(s.accuracy), f"{s.backward_bytes / 2**20:.2f}MiB", f"{s.backward_share:.1%}",
                f"{s.decide_s:.2f}s", f"{s.steps_s:.2f}s",
            )
            for s in found
        ],
    )  # fmt: skip
    screen.say()
    screen.say(f"everything about this run: {folder.path}")
    screen.document(document)


def _rows(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of an earlier run; half a line that a kill left is made again."""
    try:
        lines = (folder / "episodes.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
