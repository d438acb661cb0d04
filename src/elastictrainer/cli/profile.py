"""`elastictrainer profile`: what every tensor of a model costs to train, on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from elastictrainer.budget import format_bytes, format_seconds
from elastictrainer.cli import options
from elastictrainer.cli.app import app
from elastictrainer.cli.files import write_whole
from elastictrainer.cli.output import Output
from elastictrainer.errors import ProfileError
from elastictrainer.graph import block_of

if TYPE_CHECKING:
    from elastictrainer.profiling import Profile

__all__ = ["Row", "profile", "show", "table", "write"]

Effort = Annotated[
    int, typer.Option("--effort", min=12, help="About how many full steps it may cost.", rich_help_panel="Machine")
]
By = Annotated[
    Literal["blocks", "tensors"],
    typer.Option("--by", help="A row a block or a row a tensor.", rich_help_panel="Output"),
]
Sort = Annotated[
    Literal["network", "train", "reach", "forward", "bytes"],
    typer.Option("--sort", help="Order of the rows; 'network' is output side first.", rich_help_panel="Output"),
]
Picture = Annotated[
    Path | None,
    typer.Option(
        "--picture",
        help="Also draw the cost along the network into this .svg; one that is there is replaced.",
        rich_help_panel="Output",
    ),
]
Top = Annotated[int, typer.Option("--top", min=0, help="Only this many rows; 0 shows all.", rich_help_panel="Output")]


@app.command()
def profile(
    model: options.Model = "builtin",
    weights: options.Weights = None,
    model_options: options.ModelOptions = None,
    normalize: options.Normalize = None,
    data: options.Data = "builtin",
    data_cache: options.DataCache = None,
    image_size: options.ImageSize = None,
    batch_size: options.BatchSize = 16,
    optimizer: options.Optimizer = "sgd",
    autocast: options.Autocast = None,
    graphs: options.Graphs = True,
    bn: options.Norms = None,
    effort: Effort = 100,
    by: By = "blocks",
    sort: Sort = "network",
    top: Top = 0,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    threads: options.Threads = None,
    out: options.OutFile = None,
    picture: Picture = None,
    as_json: options.Json = False,
) -> None:
    """Time and weigh every tensor of a model on this machine.

    Costs about --effort training steps. The file it writes with --out can be planned with anywhere:

    \b
    elastictrainer profile --model resnet50 --data birds/ --batch-size 4 --out pi.json
    elastictrainer plan --profile pi.json --budget 0.5x
    """
    from elastictrainer.cli.machine import prepare
    from elastictrainer.cli.workload import load, loss_fn
    from elastictrainer.profiling import profile as measure
    from elastictrainer.report.cost import cost_picture
    from elastictrainer.runtime.optimizers import make_optimizer
    from elastictrainer.runtime.surroundings import with_autocast

    where = prepare(device, threads=threads, seed=seed)
    work = load(
        model, data, weights=weights, model_options=model_options, normalize=normalize, image_size=image_size,
        batch_size=batch_size, seed=seed, device=where, cache_dir=data_cache, progress=not as_json,
    )  # fmt: skip
    screen = Output(as_json)
    for line in work.describe():
        screen.say(line)
    steps = make_optimizer(optimizer, work.model.parameters(), lr=1e-3)
    loss = with_autocast(loss_fn, where, autocast)
    network = work.model.train()
    made = measure(
        network, loss, work.batch(), optimizer=steps, bn=bn or work.norms, effort=effort, seed=seed, captured=graphs
    )
    if out is not None:
        write(out, made.to_json())
    if picture is not None:
        title = f"What a step costs along {work.network.name}: {format_seconds(made.full_step_s)} in all"
        write(picture, cost_picture(table(made, by)[::-1], title=title))
    show(screen, made, by=by, sort=sort, top=top, written=out)


def write(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise ProfileError(f"cannot write {str(path)!r}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Row:
    """What a block or a tensor costs in a step: its forward pass, passing gradients through it, training it."""

    name: str
    tensors: int
    forward_s: float
    reach_s: float
    train_s: float
    kept_bytes: int


def table(profile: Profile, by: str) -> list[Row]:
    """A row a block (the modules of one index, such as `layer4.2`) or a tensor, output side first.

    On CUDA the figures are those of the lane that bounds the full step. Kept bytes are what training the whole row
    adds to those of everything above it.
    """
    graph = profile.graph
    lane = max(profile.lanes, key=lambda lane: lane.fixed_s + float(lane.reach_s.sum() + lane.train_s.sum()))
    rows: dict[str, list[float]] = {}
    members: dict[str, list[str]] = {}
    for i, node in enumerate(graph.nodes):
        hung = [graph.names[k] for k in node.tensors]
        key = block_of(node.module) if by == "blocks" else (hung[0] if hung else "")
        row = rows.setdefault(key, [0.0, 0.0, 0.0])
        row[0] += float(lane.forward_s[i])
        row[1] += float(lane.reach_s[i])
    for k, name in enumerate(graph.names):
        host = graph.nodes[min(graph.hosts[k])]
        key = block_of(host.module) if by == "blocks" else name
        rows.setdefault(key, [0.0, 0.0, 0.0])[2] += float(lane.train_s[k])
        members.setdefault(key, []).append(name)
    out, above = [], [graph.names[0]]
    for key, (forward_s, reach_s, train_s) in rows.items():
        names = members.get(key, [])
        kept = profile.saved_bytes([*above, *names]) - profile.saved_bytes(above)
        above += names
        out.append(Row(key or "(no module)", len(names), forward_s, reach_s, train_s, kept))
    return out


def show(screen: Output, profile: Profile, *, by: str, sort: str, top: int, written: Path | None = None) -> None:
    """Print the table, the totals and the error, or the profile as JSON."""
    rows = table(profile, by)
    if sort != "network":
        key = {"train": "train_s", "reach": "reach_s", "forward": "forward_s", "bytes": "kept_bytes"}[sort]
        rows.sort(key=lambda row: -float(getattr(row, key)))
    shown = rows[:top] if top else rows
    screen.table(
        (by[:-1], "tensors", "forward", "reach", "train", "kept"),
        [
            (r.name, r.tensors, *map(format_seconds, (r.forward_s, r.reach_s, r.train_s)), format_bytes(r.kept_bytes))
            for r in shown
        ],
    )
    if len(shown) < len(rows):
        screen.say(f"... and {len(rows) - len(shown)} more")
    screen.say()
    screen.say(
        f"full step     {format_seconds(profile.full_step_s)} on {profile.context.get('device', 'an unknown device')}"
    )
    screen.say(
        f"forward       {format_seconds(profile.forward_s)} ({profile.forward_s / profile.full_step_s:.0%} of it)"
    )
    screen.say(f"least budget  {profile.floor_s / profile.full_step_s:.2f}x: below it nothing can be trained")
    screen.say(f"peak memory   {format_bytes(profile.peak_bytes(profile.names))} with everything trained")
    screen.say(f"error         {profile.error}")
    if profile.graph.unused:
        screen.say(f"never used    {', '.join(profile.graph.unused)}")
    if written is not None:
        screen.say(f"written to    {written}")
    screen.document(profile.to_dict())
