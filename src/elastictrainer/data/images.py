"""Images through one door: a folder, a torchvision dataset by name, or the built-in digits, checked before training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from elastictrainer.budget import format_bytes, parse_bytes
from elastictrainer.data.augment import Augment
from elastictrainer.data.builtin import BUILTIN, builtin_source
from elastictrainer.data.decode import Resize
from elastictrainer.data.folder import SPLITS, folder_source
from elastictrainer.data.loader import Loader
from elastictrainer.data.normalisation import Normalisation
from elastictrainer.data.pixels import Kept, Pixels, decode_splits
from elastictrainer.data.samples import Source, split_off
from elastictrainer.data.torchvision_sets import PREFIX, torchvision_source
from elastictrainer.errors import ConfigError, DataError
from elastictrainer.metrics.memory import available_bytes

__all__ = ["Images", "load_images", "open_source"]


@dataclass(frozen=True, slots=True)
class Images:
    """Loaders for each split, and what a run's config keeps about them (`to_dict`).

    `notes` are lines for the user: what was converted, passed over or missing. `fingerprint` changes when a sample
    moves between splits, appears or disappears: compare it before resuming.
    """

    name: str
    classes: tuple[str, ...]
    train: Loader
    val: Loader | None
    test: Loader | None
    image_size: int
    normalisation: Normalisation
    augment: Augment
    split: dict[str, Any]
    fingerprint: str
    place: str
    notes: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the run's config."""
        return {
            "data": self.name,
            "classes": list(self.classes),
            "image_size": self.image_size,
            "normalize": str(self.normalisation),
            "augment": str(self.augment),
            "split": self.split,
            "fingerprint": self.fingerprint,
        }

    def __str__(self) -> str:
        counts = ", ".join(f"{loader.num_samples} {split}" for split, loader in self._loaders().items())
        return f"{self.name}: {self.num_classes} classes, {counts} images at {self.image_size} px, {self.place}"

    def _loaders(self) -> dict[str, Loader]:
        named = {"train": self.train, "val": self.val, "test": self.test}
        return {split: loader for split, loader in named.items() if loader is not None}


def load_images(
    source: str | Path = BUILTIN,
    *,
    image_size: int | None = None,
    batch_size: int = 32,
    eval_batch_size: int | None = None,
    seed: int = 0,
    val_share: float = 0.1,
    split_seed: int = 0,
    augment: str | Augment | None = None,
    normalize: str | Normalisation = "imagenet",
    resize: Resize = "crop",
    drop_last: bool = True,
    device: str | torch.device = "cpu",
    cache_bytes: str | int = "2GiB",
    device_cache_bytes: str | int = "2GiB",
    cache_dir: str | Path | None = None,
    download_dir: str | Path = "~/.cache/elastictrainer/datasets",
    workers: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Images:
    """Open a set of images, check every one of them, and return loaders.

    >>> images = load_images("builtin", batch_size=16, image_size=16)
    >>> images.num_classes, next(iter(images.train)).images.shape
    (10, torch.Size([16, 3, 16, 16]))

    Args:
        source: a folder with `train/CLASS/` (and `val/`, `test/`), `"torchvision:NAME"`, or `"builtin"`.
        image_size: side in pixels; by default what suits the source (224 for a folder). Take the model's.
        seed: of the order and the views of every epoch.
        val_share: of each training class to hold out when there is no `val/`; chosen by `split_seed`, which is apart
            from `seed` so that runs of different seeds are judged on the same images.
        augment: `none`, or `flip` and one of `crop`, `zoom`; by default `flip,crop` (`crop` for digits).
        normalize: what the model expects: `loaded.normalisation`.
        resize: `crop` keeps proportions and cuts the middle out, `squash` keeps everything and gives proportions up.
        drop_last: leave out the last, smaller training batch, so that every step has the same shape; another few images
            are left out every epoch.
        cache_bytes: keep all pixels as uint8 in memory up to this size, and never more than half of what is free; above
            it images are decoded for each batch.
        device_cache_bytes: keep them on the accelerator up to this size, and never more than a quarter of what is free.
        cache_dir: also keep the pixels in a file there; a second start then decodes nothing, and what is over
            `cache_bytes` is read from it, mapped.
        progress: called with (done, all) while decoding.

    Raises:
        DataError: in one line with the file's name, before training: a broken image, an empty class, a class of `val/`
            or `test/` that `train/` has not, an unreadable folder, too few images or classes.
    """
    limit = 0 if cache_bytes in (0, "0") else parse_bytes(cache_bytes)
    free = available_bytes()
    if free is not None:
        # What is promised to pixels is gone for the network; a small board's kernel would end the run by a signal.
        limit = min(limit, free // 2)
    if image_size is not None and image_size < 1:
        raise ConfigError(f"image_size {image_size} must be at least 1")
    if resize not in ("crop", "squash"):
        raise ConfigError(f"resize {resize!r} is unknown; use 'crop' or 'squash'")
    views = None if augment is None else Augment.parse(augment)
    normalisation = Normalisation.parse(normalize)
    opened = open_source(source, download_dir=download_dir)
    given = "val" in opened.splits
    if not given:
        opened = split_off(opened, share=val_share, seed=split_seed)
    size = image_size or opened.image_size or 224
    place = torch.device(device)
    pixels, converted, where = decode_splits(
        opened.splits,
        size=size,
        resize=resize,
        limit_bytes=limit,
        cache_dir=cache_dir,
        workers=workers,
        progress=progress,
    )
    if place.type != "cpu":
        pixels, where = _towards_device(pixels, where, place, device_cache_bytes)
    if converted:
        opened = replace(opened, notes=(*opened.notes, f"turned into RGB: {converted}"))
    views = views or Augment.parse(opened.augment)

    def loader(split: str) -> Loader | None:
        if split not in opened.splits:
            return None
        training = split == "train"
        return Loader(
            pixels[split],
            opened.splits[split].labels,
            image_size=size,
            batch_size=batch_size if training else eval_batch_size or batch_size,
            normalisation=normalisation,
            augment=views if training else None,
            shuffle=training,
            drop_last=drop_last and training,
            seed=seed,
            device=place,
        )

    train = loader("train")
    assert train is not None  # every Source has a train split
    record: dict[str, Any] = {split: len(opened.splits[split]) for split in SPLITS if split in opened.splits}
    if not given:
        record |= {"val_from_train": True, "val_share": val_share, "split_seed": split_seed}
    return Images(
        name=opened.name,
        classes=opened.classes,
        train=train,
        val=loader("val"),
        test=loader("test"),
        image_size=size,
        normalisation=normalisation,
        augment=views,
        split=record,
        fingerprint=opened.fingerprint(),
        place=where,
        notes=opened.notes,
    )


def open_source(source: str | Path, *, download_dir: str | Path) -> Source:
    """The samples of a source, listed and checked but not decoded."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise DataError("images need Pillow; install elastictrainer[vision]") from error
    if source == BUILTIN:
        return builtin_source()
    if isinstance(source, str) and source.startswith(PREFIX):
        return torchvision_source(source.removeprefix(PREFIX), root=download_dir)
    return folder_source(source)


def _towards_device(
    pixels: dict[str, Pixels], where: str, device: torch.device, limit: str | int
) -> tuple[dict[str, Pixels], str]:
    """Move kept pixels onto the device if they fit, so that no step waits for a copy; else copy from pinned memory."""
    kept = {split: p for split, p in pixels.items() if isinstance(p, Kept)}
    if len(kept) < len(pixels):
        return pixels, where
    nbytes = sum(p.images.numel() for p in kept.values())
    room = 0 if limit in (0, "0") else parse_bytes(limit)
    if device.type == "cuda":
        room = min(room, torch.cuda.mem_get_info(device)[0] // 4)
    if nbytes <= room:
        return {split: Kept(p.images.to(device)) for split, p in kept.items()}, f"on {device} ({format_bytes(nbytes)})"
    return {split: Kept(p.images, pin=device.type == "cuda") for split, p in kept.items()}, where
