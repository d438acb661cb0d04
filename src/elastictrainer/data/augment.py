"""Flips and crops for a whole batch at once, on the device, each sample's view fixed by (seed, epoch, sample)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from elastictrainer.data.hashing import keys, uniform
from elastictrainer.data.normalisation import Normalisation
from elastictrainer.errors import ConfigError

__all__ = ["Augment", "Scaling", "Views", "prepare"]

# Images are worked on a few at a time on a CPU, so that what one pass wrote is still in the cache for the next.
_CPU_CHUNK = 4


class Views(NamedTuple):
    """How each sample of a run of samples is seen: mirrored or not, and where it is cropped.

    `shift` is (down, right) in pixels; `box` is (centre y, centre x, height, width) on a -1 to 1 scale. `code` is equal
    for two views of a sample exactly when their pixels are.
    """

    flip: Tensor
    shift: Tensor
    box: Tensor | None
    code: Tensor

    def span(self, start: int, stop: int) -> Views:
        box = None if self.box is None else self.box[start:stop]
        return Views(self.flip[start:stop], self.shift[start:stop], box, self.code[start:stop])

    def to(self, device: torch.device) -> Views:
        box = None if self.box is None else self.box.to(device)
        return Views(self.flip.to(device), self.shift.to(device), box, self.code.to(device))


@dataclass(frozen=True, slots=True)
class Augment:
    """What may change about an image: `flip` mirrors it; `crop` shifts it by up to an eighth, the border mirrored;
    `zoom` cuts a box of 30% to 100% of its area with sides 3:4 to 4:3 and scales it up, bilinearly.

    >>> Augment.parse("flip,crop")
    Augment(flip=True, crop='shift')
    >>> str(Augment.parse("none"))
    'none'
    """

    flip: bool = False
    crop: Literal["none", "shift", "zoom"] = "none"

    @classmethod
    def parse(cls, text: str | Augment) -> Augment:
        if isinstance(text, Augment):
            return text
        words = {word.strip().lower() for word in text.split(",")} - {"", "none"}
        unknown = words - {"flip", "crop", "zoom"}
        if unknown or {"crop", "zoom"} <= words:
            raise ConfigError(f"augment {text!r} cannot be read; use none, flip, crop or zoom, for example 'flip,crop'")
        return cls("flip" in words, "shift" if "crop" in words else "zoom" if "zoom" in words else "none")

    def __str__(self) -> str:
        crop = {"none": "", "shift": "crop", "zoom": "zoom"}[self.crop]
        return ",".join(filter(None, ("flip" if self.flip else "", crop))) or "none"

    def views(self, seed: int, epoch: int, samples: NDArray[np.int64], *, size: int) -> Views:
        """The views of these samples in this epoch. Costs a few passes over one number a sample, no image."""
        count = len(samples)
        flip = np.zeros(count, dtype=np.bool_)
        shift = np.zeros((count, 2), dtype=np.int64)
        code = np.zeros(count, dtype=np.int64)
        boxes: Tensor | None = None
        if self.flip:
            flip = uniform(seed, epoch, samples, stream=0) < 0.5
        if self.crop == "shift":
            reach = size // 8
            draws = [uniform(seed, epoch, samples, stream=s) for s in (1, 2)]
            shift = np.stack([np.floor(d * (2 * reach + 1)).astype(np.int64) - reach for d in draws], axis=1)
            code = (shift[:, 0] + reach) * (2 * reach + 1) + shift[:, 1] + reach
        elif self.crop == "zoom":
            area, ratio, down, right = (uniform(seed, epoch, samples, stream=s) for s in (3, 4, 5, 6))
            side = np.sqrt(0.3 + 0.7 * area)
            stretch = np.exp((ratio - 0.5) * np.log(4 / 3))
            height, width = np.minimum(side * stretch, 1), np.minimum(side / stretch, 1)
            centre_y, centre_x = (2 * down - 1) * (1 - height), (2 * right - 1) * (1 - width)
            box = np.stack([centre_y, centre_x, height, width], axis=1).astype(np.float32)
            # A continuous view has no short name; its random key stands for it.
            code = (keys(seed, epoch, samples) >> np.uint64(2)).astype(np.int64)
            boxes = torch.from_numpy(box)
        return Views(torch.from_numpy(flip), torch.from_numpy(shift), boxes, torch.from_numpy(code * 2 + flip))


class Scaling(NamedTuple):
    """A normalisation as one multiplication and one addition on pixels from 0 to 255, kept on the device."""

    scale: Tensor
    offset: Tensor

    @classmethod
    def of(cls, normalisation: Normalisation, device: torch.device) -> Scaling:
        scale = [1 / (255 * std) for std in normalisation.std]
        offset = [-mean / std for mean, std in zip(normalisation.mean, normalisation.std)]
        return cls(*(torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (scale, offset)))


def prepare(pixels: Tensor, views: Views | None, scaling: Scaling) -> Tensor:
    """Pixels (uint8, batch x 3 x size x size) as seen: cropped, mirrored and normalised, float32, on their own device.

    No sample is handled on its own and nothing waits for the device. A sample comes out the same bit for bit whatever
    batch it is in. Costs about 0.2 ms an image of 224 pixels on one core (flip and crop), a quarter of it without.
    """
    out = torch.empty(pixels.shape, dtype=torch.float32, device=pixels.device)
    step = _CPU_CHUNK if pixels.device.type == "cpu" else max(1, len(pixels))
    for start in range(0, len(pixels), step):
        part = pixels[start : start + step]
        seen = part if views is None else _see(part, views.span(start, start + step))
        torch.mul(seen, scaling.scale, out=out[start : start + step]).add_(scaling.offset)
    return out


def _see(pixels: Tensor, views: Views) -> Tensor:
    if views.box is not None:
        return _zoom(pixels, views.flip, views.box)
    count, channels, height, width = pixels.shape
    rows = _mirrored(torch.arange(height, device=pixels.device) + views.shift[:, :1], height)
    columns = _mirrored(torch.arange(width, device=pixels.device) + views.shift[:, 1:], width)
    columns = torch.where(views.flip[:, None], columns.flip(1), columns)
    # Whole rows first (plain copies), then columns inside them: several times faster than one gather over both axes.
    planes = torch.arange(count * channels, device=pixels.device).view(count, channels, 1) * height
    seen = pixels.reshape(-1, width).index_select(0, (planes + rows[:, None, :]).reshape(-1))
    index = columns[:, None, :].expand(count, channels * height, width)
    return seen.view(count, channels * height, width).gather(2, index).view_as(pixels)


def _mirrored(position: Tensor, size: int) -> Tensor:
    """Positions beyond an edge come back from it, the edge pixel not repeated."""
    return (size - 1) - ((size - 1) - position.abs()).abs()


def _zoom(pixels: Tensor, flip: Tensor, box: Tensor) -> Tensor:
    size = pixels.shape[-1]
    steps = (torch.arange(size, device=pixels.device, dtype=torch.float32) * 2 + 1) / size - 1
    rows = box[:, 0:1] + box[:, 2:3] * steps
    columns = box[:, 1:2] + box[:, 3:4] * torch.where(flip[:, None], -steps, steps)
    grid = torch.stack([columns[:, None, :].expand(-1, size, -1), rows[:, :, None].expand(-1, -1, size)], dim=-1)
    return F.grid_sample(pixels.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
