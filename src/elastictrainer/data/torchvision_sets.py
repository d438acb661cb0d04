"""A torchvision dataset by name, `torchvision:CIFAR10`, with torchvision's own download."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import numpy as np
from numpy.typing import NDArray

from elastictrainer.data.model_options import parse_model_options
from elastictrainer.data.samples import Samples, Source
from elastictrainer.data.weights import one_line
from elastictrainer.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["DatasetEntry", "list_datasets", "torchvision_source"]

PREFIX = "torchvision:"
# What the sets call their splits; each set checks its own argument, so the first name it takes is the right one.
_SPLIT_NAMES = {"train": ("train", "trainval"), "val": ("val", "valid"), "test": ("test",)}
# For the listing only: other sets can be named too and are refused with a reason when they are no classification.
_LISTED = {
    "CIFAR10": "60,000 photographs of 10 kinds of thing, at 32 px",
    "CIFAR100": "60,000 photographs of 100 kinds of thing, at 32 px",
    "Caltech101": "9,000 photographs of 101 kinds of thing",
    "Country211": "63,000 photographs from 211 countries",
    "DTD": "5,640 textures of 47 kinds",
    "EuroSAT": "27,000 satellite images of 10 kinds of land, at 64 px",
    "FGVCAircraft": "10,000 photographs of 100 kinds of aircraft",
    "FashionMNIST": "70,000 grey images of 10 kinds of clothing, at 28 px",
    "Flowers102": "8,189 photographs of 102 kinds of flower",
    "Food101": "101,000 photographs of 101 dishes",
    "GTSRB": "39,000 photographs of 43 German traffic signs",
    "Imagenette": "13,000 photographs of 10 classes of ImageNet that are easy to tell apart",
    "KMNIST": "70,000 handwritten Japanese characters of 10 kinds, at 28 px",
    "MNIST": "70,000 handwritten digits, 10 classes, at 28 px",
    "OxfordIIITPet": "7,349 photographs of 37 breeds of cats and dogs",
    "RenderedSST2": "9,613 sentences as images, of 2 sentiments",
    "STL10": "13,000 photographs of 10 kinds of thing, at 96 px",
    "SVHN": "99,000 photographs of digits of house numbers, 10 classes, at 32 px",
    "USPS": "9,298 handwritten digits, 10 classes, at 16 px",
}


@dataclass(frozen=True, slots=True)
class DatasetEntry:
    """One line of `elastictrainer ls datasets`."""

    name: str
    description: str


def list_datasets() -> Iterator[DatasetEntry]:
    """What `--data` understands, described; torchvision's sets only where it is installed."""
    yield DatasetEntry("builtin", "1,797 handwritten digits from scikit-learn, 10 classes, at 64 px (extra: demo)")
    yield DatasetEntry("DIR", "an image folder with train/CLASS/, and val/ and test/ where you have them")
    try:
        import torchvision.datasets as sets
    except ImportError:
        return
    for name, words in _LISTED.items():
        if hasattr(sets, name):
            yield DatasetEntry(PREFIX + name, words)


def torchvision_source(name: str, *, root: str | Path) -> Source:
    """`NAME` or `NAME?ARGUMENT=VALUE&...` from torchvision, downloaded to `root` by torchvision if it is not there.

    Raises:
        DataError: for an unknown set, one that is no classification, or a download that fails, in one line.
    """
    try:
        import torchvision.datasets as sets
    except ImportError as error:
        raise DataError(f"data {PREFIX}{name!r} needs torchvision; install elastictrainer[vision]") from error
    bare, _, query = name.partition("?")
    arguments = parse_model_options(dict(parse_qsl(query, keep_blank_values=True)))
    kind = getattr(sets, bare, None)
    if not (inspect.isclass(kind) and issubclass(kind, sets.VisionDataset)):
        raise DataError(
            f"data {PREFIX + bare!r}: torchvision has no such dataset; `elastictrainer ls datasets` lists them"
        )
    accepted = _arguments(kind)
    common = {"root": Path(root).expanduser(), "download": True}
    arguments = {**{key: value for key, value in common.items() if key in accepted}, **arguments}
    opened: dict[str, Any] = {}
    for split in ("train", "val", "test"):
        opened |= _open(kind, split, accepted, arguments, bare)
    train = opened["train"]
    labels = {split: _labels(dataset, bare) for split, dataset in opened.items()}
    count = max(int(values.max(initial=-1)) for values in labels.values()) + 1
    classes = tuple(map(str, getattr(train, "classes", ())))
    if len(classes) != count:
        classes = tuple(map(str, range(count)))
    splits = {split: _samples(dataset, split, labels[split], PREFIX + name) for split, dataset in opened.items()}
    return Source(PREFIX + name, classes, splits)


def _arguments(kind: type) -> set[str]:
    """What a set's constructor takes, its bases' too where it passes `**kwargs` on."""
    names: set[str] = set()
    for base in kind.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
            names |= {parameter.name for parameter in parameters}
            if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
                break
    return names


def _open(kind: Any, split: str, accepted: set[str], arguments: dict[str, Any], name: str) -> dict[str, Any]:
    tries: list[dict[str, Any]]
    if "train" in accepted and "train" not in arguments:
        tries = [] if split == "val" else [{"train": split == "train"}]
    elif "split" in accepted and "split" not in arguments:
        tries = [{"split": word} for word in _SPLIT_NAMES[split]]
    else:
        tries = [{}] if split == "train" else []
    refused: Exception | None = None
    for choice in tries:
        try:
            return {split: kind(**arguments, **choice)}
        except ValueError as error:
            if "split" not in choice:
                raise DataError(f"data {PREFIX}{name}: {one_line(error)}") from error
            refused = error
        except TypeError as error:
            raise DataError(f"data {PREFIX}{name}: {one_line(error)}; add arguments as {name}?NAME=VALUE") from error
        except ImportError as error:  # some sets keep their labels in MATLAB's format and ask for scipy
            package = error.name or one_line(error)
            raise DataError(f"data {PREFIX}{name} needs the package {package}; pip install {package}") from error
        except (OSError, RuntimeError) as error:
            raise DataError(
                f"data {PREFIX}{name} cannot be had: {one_line(error)}; is the network reachable? "
                f"Or put its files in {arguments.get('root', 'its folder')} as torchvision lays them out"
            ) from error
    if split == "train":
        raise DataError(
            f"data {PREFIX}{name} has no training split: {one_line(refused) if refused else 'none is known'}"
        )
    return {}


def _labels(dataset: Any, name: str) -> NDArray[np.int64]:
    for attribute in ("targets", "labels", "_labels"):
        values = getattr(dataset, attribute, None)
        if values is not None and len(values) == len(dataset):
            labels = np.asarray(values)
            if (
                labels.ndim == 1
                and np.issubdtype(labels.dtype, np.integer)
                and int(labels[0]) == _label(dataset[0], name)
            ):
                return labels.astype(np.int64)
    return np.array([_label(dataset[index], name) for index in range(len(dataset))], dtype=np.int64)


def _label(item: Any, name: str) -> int:
    if not (
        isinstance(item, Sequence)
        and len(item) == 2
        and np.ndim(item[1]) == 0
        and np.asarray(item[1]).dtype.kind in "iu"
    ):
        raise DataError(f"data {PREFIX}{name} is no image classification: its items are not (image, class number)")
    return int(item[1])


def _samples(dataset: Any, split: str, labels: NDArray[np.int64], name: str) -> Samples:
    # Some sets read through one shared file handle or seed torch per item, so items are fetched one at a time.
    lock = threading.Lock()

    def open_image(index: int) -> Image:
        from PIL import Image as pillow

        with lock:
            image = dataset[index][0]
        return image if isinstance(image, pillow.Image) else pillow.fromarray(np.asarray(image))

    return Samples([f"{split}/{index}" for index in range(len(dataset))], labels, [name] * len(dataset), open_image)
