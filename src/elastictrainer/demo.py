"""`make demo`: a pretrained network on real images, in full and then within a budget, and what came of both.

    python -m elastictrainer.demo

The network (EfficientNet-Lite0, trained on ImageNet) and the images (1,797 handwritten digits) arrive as ordinary
packages, so nothing is downloaded. Takes under three minutes on two cores.
"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from elastictrainer.cli.output import Output
from elastictrainer.errors import ElasticTrainerError
from elastictrainer.report import write_comparison

if TYPE_CHECKING:
    from elastictrainer.runtime.result import Result

__all__ = ["main"]

EPOCHS = 5
BATCH_SIZE = 16
LEARNING_RATE = 3e-3
BUDGET = "0.5x"


def main() -> int:
    """Run the demo; an error is one line, as on the command line."""
    out = Output()
    folder = _new_folder(Path("runs"))
    try:
        full = _train("full", folder)
        elastic = _train("elastic", folder)
        report = write_comparison([folder / "full", folder / "elastic"], folder / "report.html")
    except KeyboardInterrupt:
        print("elastictrainer: interrupted", file=sys.stderr)
        return 130
    except ElasticTrainerError as error:
        print(f"elastictrainer: error: {error}", file=sys.stderr)
        return error.exit_code
    out.say()
    out.table(
        ("trained", "accuracy", "seconds", "ratio asked", "ratio got"),
        [_row("everything", full), _row(f"within {BUDGET}", elastic)],
    )
    spent = f"of the {elastic.train_s:.0f} s, {sum(elastic.overhead_s.values()):.0f} s were deciding"
    out.say(f"a ratio is of the seconds of as many full steps; {spent}")
    out.say()
    out.say(f"report: {report.resolve()}")
    out.say(f"the runs, with their plans, profiles and weights: {folder.resolve()}")
    return 0


def _train(policy: str, folder: Path) -> Result:
    import torch
    from torch.nn.functional import cross_entropy

    import elastictrainer as et
    from elastictrainer.data import load_images, load_model

    net = load_model("builtin", num_classes=10)
    images = load_images("builtin", image_size=net.image_size, normalize=net.normalisation, batch_size=BATCH_SIZE)
    print(f"\n{policy}: {net.name} on {images}")
    return et.fit(
        net.model,
        torch.optim.SGD(net.model.parameters(), lr=LEARNING_RATE, momentum=0.9),
        lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        images.train,
        epochs=EPOCHS,
        budget=BUDGET,
        bn="track",  # digits are far from ImageNet: its statistics do not fit them
        policy=policy,
        interval=1,  # the run is short: what is worth training changes from epoch to epoch
        val_loader=images.val,
        test_loader=images.test,
        cache=folder / "profiles",
        out=folder / policy,
    )


def _row(name: str, result: Result) -> tuple[object, ...]:
    final = result.accuracy["final"]
    got = "" if result.measured_ratio is None else f"{result.measured_ratio:.2f}x"
    return name, f"{final:.1%}", f"{result.train_s:.0f}", result.budget or "1x", got


def _new_folder(parent: Path) -> Path:
    """`runs/demo`, or the first `runs/demo-N` that is not taken: no run is ever overwritten."""
    names = (parent / ("demo" if number == 1 else f"demo-{number}") for number in count(1))
    return next(folder for folder in names if not folder.exists())


if __name__ == "__main__":
    sys.exit(main())
