"""`elastictrainer metatrain`: teach a network's features to be compared, on tasks of a source domain."""

from __future__ import annotations

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
    from elastictrainer.data.episodes import Bank
    from elastictrainer.data.models import load_model
    from elastictrainer.errors import ConfigError
    from elastictrainer.fewshot.heads import Prototypes, last_linear
    from elastictrainer.fewshot.meta import held_out, meta_train

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
    screen.say(str(network))
    screen.say(f"{bank.name}: {len(seen)} classes to train on, {len(unseen)} held out")
    result = meta_train(
        network.model,
        head,
        bank,
        out=out if out is not None else new_folder(Path("runs"), "metatrain"),
        resume=resume,
        ways=ways,
        shots=shots,
        queries=queries,
        episodes=episodes,
        epochs=epochs,
        optimizer=optimizer,
        lr=lr,
        seed=seed,
        deterministic=deterministic,
        progress=not as_json,
        config={"model": network.name, "weights": network.source},
        weights_metadata=network.metadata(),
    )
    show(screen, result)
