"""One image, whatever Pillow can open, as square 8-bit RGB; and many of them, in threads, every broken one named."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from elastictrainer.errors import ConfigError, DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Conversions", "Resize", "decode", "decode_all", "worker_count"]

Resize = Literal["crop", "squash"]
_KINDS = {"L": "grey", "1": "black and white", "LA": "grey with transparency", "La": "grey with transparency",
          "RGBA": "with transparency", "RGBa": "with transparency", "P": "palette", "PA": "palette", "CMYK": "CMYK",
          "YCbCr": "YCbCr", "HSV": "HSV", "I": "16-bit", "I;16": "16-bit", "I;16B": "16-bit", "I;16L": "16-bit",
          "I;16N": "16-bit", "LAB": "Lab"}  # fmt: skip


@dataclass
class Conversions:
    """What had to be turned into RGB: how many of each kind, and the first of each by name."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, mode: str, name: str) -> None:
        if mode != "RGB":
            kind = _KINDS.get(mode, mode)
            self.counts[kind] += 1
            self.first.setdefault(kind, name)

    def __str__(self) -> str:
        return ", ".join(f"{count} {kind} (first: {self.first[kind]})" for kind, count in sorted(self.counts.items()))


def decode(image: Image, *, size: int, resize: Resize = "crop") -> tuple[NDArray[np.uint8], str]:
    """An opened image as uint8, 3 x size x size, and the mode it had.

    The camera's orientation is applied; grey becomes three equal channels; transparency is laid on white; 16 bits are
    scaled to 8, not cut off; of an animation the first frame counts. `resize="crop"` scales the shorter side and cuts
    the middle out, `"squash"` gives up the proportions. Large JPEGs are decoded at reduced size where nothing is lost.
    """
    from PIL import Image as pillow
    from PIL import ImageOps

    mode = str(image.mode)
    if min(image.size) >= 2 * size:
        image.draft(None, (size * 2, size * 2))
    image.load()
    upright = ImageOps.exif_transpose(image) or image
    rgb = _to_rgb(upright)
    if rgb.size != (size, size):
        if resize == "squash":
            rgb = rgb.resize((size, size), pillow.Resampling.BILINEAR, reducing_gap=3.0)
        else:
            width, height = rgb.size
            side = min(width, height)
            left, top = (width - side) / 2, (height - side) / 2
            middle = (left, top, left + side, top + side)
            rgb = rgb.resize((size, size), pillow.Resampling.BILINEAR, middle, reducing_gap=3.0)
    return np.ascontiguousarray(np.asarray(rgb, dtype=np.uint8).transpose(2, 0, 1)), mode


def decode_all(
    open_image: Callable[[int], Image],
    names: Sequence[str],
    *,
    size: int,
    resize: Resize,
    keep: Callable[[int, NDArray[np.uint8]], object],
    progress: Callable[[int, int], object] | None = None,
    workers: int | None = None,
) -> Conversions:
    """Decode every image once, in threads, handing each to `keep`; all that cannot be read are reported together.

    Raises:
        DataError: naming the first few broken images and the number of all.

    Costs a full decode of the set (Pillow works outside Python's lock, so every core takes part) and no memory beyond
    what `keep` keeps.
    """
    conversions, broken = Conversions(), []

    def work(index: int) -> tuple[int, str | None, str]:
        try:
            with open_image(index) as image:
                pixels, mode = decode(image, size=size, resize=resize)
            keep(index, pixels)
        except Exception as error:  # Pillow's plugins raise what they like: OSError, SyntaxError, struct.error, ...
            if isinstance(error, (MemoryError, ConfigError)):
                raise
            return index, _reason(error), ""
        return index, None, mode

    results = _in_threads(work, range(len(names)), workers or worker_count())
    with warnings.catch_warnings():
        # Pillow's remarks (odd EXIF, palettes) name no file; what cannot be read is an error below, by name.
        warnings.simplefilter("ignore")
        for done, (index, reason, mode) in enumerate(results, 1):
            if reason is None:
                conversions.add(mode, names[index])
            else:
                broken.append(f"{names[index]} ({reason})")
            if progress is not None:
                progress(done, len(names))
    if broken:
        count = "1 image" if len(broken) == 1 else f"{len(broken)} images"
        more = f" and {len(broken) - 5} more" if len(broken) > 5 else ""
        raise DataError(f"{count} cannot be read: {', '.join(broken[:5])}{more}; repair or remove what is broken")
    return conversions


def worker_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_threads(
    work: Callable[[int], tuple[int, str | None, str]], items: Iterable[int], workers: int
) -> Iterator[tuple[int, str | None, str]]:
    """Like `map`, in order, with only a few items under way: a million futures would cost more than the images."""
    pending = iter(items)
    with ThreadPoolExecutor(workers, thread_name_prefix="decode") as pool:
        while chunk := list(islice(pending, 64 * workers)):
            yield from pool.map(work, chunk)


def _to_rgb(image: Image) -> Image:
    from PIL import Image as pillow

    mode = image.mode
    if mode == "RGB" and "transparency" not in image.info:
        return image
    if mode.startswith("I"):
        # Pillow would cut values above 255 off; 16-bit sensors and medical images use the whole range.
        wide = np.asarray(image).astype(np.int64)
        return pillow.fromarray((np.clip(wide, 0, 65535) >> 8).astype(np.uint8)).convert("RGB")
    if mode == "F":
        raise ValueError("floating-point pixels have no fixed range; save it with 8 or 16 bits")
    if mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        layered = image.convert("RGBA")
        return pillow.alpha_composite(pillow.new("RGBA", layered.size, (255, 255, 255, 255)), layered).convert("RGB")
    return image.convert("RGB")


def _reason(error: Exception) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "not an image that Pillow can read"
    if isinstance(error, FileNotFoundError):
        return "a link to nothing, or deleted meanwhile"
    if isinstance(error, PermissionError):
        return "no permission to read it"
    if isinstance(error, DataError):
        return str(error)
    return " ".join(str(error).split())[:120] or type(error).__name__
