"""How many images a second the loader delivers, on one thread, with every augmentation.

    python benchmarks/loader.py
    python benchmarks/loader.py --device cuda

Random pixels that were decoded before, in memory and, where there is one, on the device. `batch_ms` is what a batch
takes: steps that take longer never wait for it.

Writes results/loader_*.csv (a row a setting) and prints it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

from elastictrainer.data import Augment, Loader, Normalisation
from elastictrainer.data.pixels import Kept

sys.path.insert(0, str(Path(__file__).parent))
from common import RESULTS, print_table, where, write_csv


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    device, size = torch.device(args.device), args.image_size
    shape = (args.images, 3, size, size)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(args.seed))
    places = {"memory": pixels} | ({"device": pixels.to(device)} if device.type == "cuda" else {})
    rows = []
    for place, kept in places.items():
        for batch_size in (4, 64):
            for augment in ("none", "flip,crop", "flip,zoom"):
                loader = Loader(
                    Kept(kept, pin=place == "memory" and device.type == "cuda"),
                    np.zeros(args.images, dtype=np.int64),
                    image_size=size,
                    batch_size=batch_size,
                    normalisation=Normalisation.parse("imagenet"),
                    augment=Augment.parse(augment),
                    shuffle=True,
                    device=device,
                )
                speed = images_per_s(loader, seconds=args.seconds)
                row = {"pixels_in": place, "batch": batch_size, "augment": augment, "image": size}
                row |= {"images_per_s": speed, "batch_ms": 1e3 * batch_size / speed, "seed": args.seed}
                rows.append(row | where(args.device))
    write_csv(args.out / f"loader_{args.device}.csv", rows)
    print_table(rows, ["pixels_in", "batch", "augment", "image", "images_per_s", "batch_ms"])


if __name__ == "__main__":
    main()
