"""How many images a second the loader delivers: `python benchmarks/loader.py [--device cuda] [--out FILE.csv]`.

One thread, random pixels in memory (on the device where there is one), every augmentation. Each line names the device,
the versions and the commit.
"""

from __future__ import annotations

import argparse
import csv
import platform
import subprocess
import sys
import time

import numpy as np
import torch

from elastictrainer.data import Augment, Loader, Normalisation
from elastictrainer.data.pixels import Kept


def images_per_s(loader: Loader, *, seconds: float) -> float:
    """Deliveries over at least `seconds`, after a warm-up, the device waited for at the end."""
    done, epoch = 0, 0
    start: float | None = None
    while True:
        for number, batch in enumerate(loader.iterate(epoch)):
            if start is None and number == 5:
                start, done = _now(loader.device), 0
            done += len(batch.images)
            if start is not None and number % 16 == 0 and _now(loader.device) - start > seconds:
                return done / (_now(loader.device) - start)
        epoch += 1


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    shape = (options.images, 3, options.size, options.size)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    places = {"host": pixels, "device": pixels.to(device)} if device.type == "cuda" else {"host": pixels}
    writer = csv.writer(open(options.out, "w", newline="") if options.out else sys.stdout)  # noqa: SIM115
    writer.writerow(["place", "batch_size", "augment", "image_size", "images_per_s", "device", "torch", "commit"])
    for place, kept in places.items():
        for batch_size in (4, 64):
            for augment in ("none", "flip,crop", "flip,zoom"):
                loader = Loader(
                    Kept(kept, pin=place == "host" and device.type == "cuda"),
                    np.zeros(options.images, dtype=np.int64),
                    image_size=options.size,
                    batch_size=batch_size,
                    normalisation=Normalisation.parse("imagenet"),
                    augment=Augment.parse(augment),
                    shuffle=True,
                    device=device,
                )
                speed = images_per_s(loader, seconds=options.seconds)
                writer.writerow(
                    [place, batch_size, augment, options.size, round(speed), where, torch.__version__, commit]
                )


if __name__ == "__main__":
    main()
