"""`elastictrainer metatrain`: teach a network's features to be compared, on tasks of a source domain."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from elastictrainer.cli import options
from elastictrainer.cli.app import app
from elastictrainer.cli.fewshot import Queries, Shots, Ways
from elastictrainer.cli.output import Output

__all__ = ["metatrain"]

PerEpoch = Annotated[
    int, typer.Option("--episodes", min=1, help="Tasks in an epoch: a step each.", rich_help_panel="Tasks")
]


@app.command()
def metatrain(
    model: options.Model = "builtin",
    weights: options.Weights = None,
    model_options: options.ModelOptions = None,
    normalize: options.Normalize = None,
    data: options.Data = "builtin",
    image_size: options.ImageSize = None,
    ways: Ways = 5,
    shots: Shots = 5,
    queries: Queries = 10,
    episodes: PerEpoch = 100,
    epochs: options.Epochs = 10,
    optimizer: options.Optimizer = "sgd",
    lr: options.LearningRate = 1e-3,
    seed: options.Seed = 0,
    deterministic: options.Deterministic = False,
    device: options.Device = "auto",
    threads: options.Threads = None,
    out: options.Out = None,
    resume: options.Resume = False,
    as_json: options.Json = False,
) -> None:
    """Train on many small tasks, for features to adapt from.

    Everything trains, so that features can be compared in tasks that are new. Every fifth class of --data is held out;
    the epoch that does best on tasks of these is kept. The run folder is that of `train`, killed at any moment it goes
    on with --resume, and its model.safetensors is for --weights of `adapt` and `fewshot`.

    \b
    elastictrainer metatrain --model mobilenet_v2 --weights default --data tinyimagenet/ --out runs/meta
    elastictrainer adapt --model mobilenet_v2 --weights runs/meta/model.safetensors --data birds/
    """
    from elastictrainer.cli.machine import prepare
    from elastictrainer.cli.train import new_folder, show
    from elastictrainer.data.episodes import Bank, Episodes
    from elastictrainer.data.models import load_model
    from elastictrainer.errors import ConfigError, DataError
    from elastictrainer.fewshot.heads import Prototypes, last_linear
    from elastictrainer.fewshot.meta import EpisodeLoader, held_out, task_loss, task_metric
    from elastictrainer.runtime.loop import fit
    from elastictrainer.runtime.optimizers import make_optimizer

    if resume and out is None:
        raise ConfigError("--resume needs --out, the folder of the run to go on with")
    screen = Output(as_json)
    where = prepare(device, threads=threads, seed=seed, deterministic=deterministic)
    network = load_model(
        model, weights=weights, image_size=image_size, model_options=model_options, normalize=normalize, seed=seed
    )
    network.model.to(where)
    head = Prototypes(last_linear(network.model, network.head))
    bank = Bank(
        data, image_size=network.image_size, normalisation=network.normalisation, split="train", seed=seed, device=where
    )  # fmt: skip
    seen, unseen = held_out(len(bank.classes))
    if len(unseen) < 2:
        raise DataError(f"{bank.name} has {len(bank.classes)} classes; meta-training needs at least 10, to hold 2 out")
    shape = {"shots": shots, "queries": queries}
    training = Episodes(bank.labels, ways=min(ways, len(seen)), seed=seed, only=seen, **shape)
    judging = Episodes(bank.labels, ways=min(ways, len(unseen)), seed=seed + 1, only=unseen, **shape)
    screen.say(str(network))
    screen.say(f"{bank.name}: {len(seen)} classes to train on, {len(unseen)} held out")
    result = fit(
        network.model,
        make_optimizer(optimizer, network.model.parameters(), lr=lr),
        functools.partial(task_loss, head),
        EpisodeLoader(bank, training, episodes),
        epochs=epochs,
        budget="1x",
        policy="full",
        val_loader=EpisodeLoader(bank, judging, max(20, episodes // 5), augmented=False),
        metric=functools.partial(task_metric, head),
        out=out if out is not None else new_folder(Path("runs"), "metatrain"),
        resume=resume,
        seed=seed,
        deterministic=deterministic,
        progress=not as_json,
        config={
            "model": network.name, "weights": network.source, "data": bank.name, "fingerprint": bank.fingerprint,
            "image_size": bank.image_size, "ways": ways, "shots": shots, "queries": queries,
        },
        weights_metadata=network.metadata(),
    )  # fmt: skip
    show(screen, result)
