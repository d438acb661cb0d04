"""An image folder, `ROOT/{train,val,test}/CLASS/**/IMAGE`, read once and checked whole before anything trains on it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from elastictrainer.data.samples import Samples, Source
from elastictrainer.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["folder_source", "natural_key"]

SPLITS = ("train", "val", "test")
_MISNAMED = {"valid": "val", "validation": "val", "dev": "val", "training": "train", "testing": "test"}
_LITTER = {"thumbs.db", "desktop.ini", "@eadir", "__macosx"}


def folder_source(root: str | Path) -> Source:
    """The images of a folder, by split and class; classes in natural order (`class2` before `class10`).

    A folder without `train/` whose subfolders are the classes counts as all `train`. Hidden files and what file
    managers leave behind are passed over; files that are no image by their ending are counted in the notes.

    Raises:
        DataError: one line that names the folder or file, for anything that cannot be trained on.

    Costs one walk of the tree and a `stat` a file; no image is opened.
    """
    top = Path(root).expanduser()
    # An empty name would be the current folder, which nobody meant.
    if not str(root).strip() or not top.is_dir():
        raise DataError(f"data {str(root)!r}: no such folder; give an image folder, 'builtin' or 'torchvision:NAME'")
    entries = [entry.name for entry in _listing(top) if entry.is_dir()]
    for name in entries:
        right = _MISNAMED.get(name.lower()) or _other_case(name, entries)
        if right:
            raise DataError(f"{top / name}: rename this folder to {right!r}; splits are {', '.join(SPLITS)}")
    present = [split for split in SPLITS if split in entries]
    if present and "train" not in present:
        raise DataError(f"{top}: has {', '.join(present)} but no train folder; images go to train/CLASS/")
    folders = {split: top / split for split in present} or {"train": top}
    found = {split: _classes(folder) for split, folder in folders.items()}
    classes = tuple(sorted(found["train"], key=natural_key))
    if not classes:
        raise DataError(f"{folders['train']}: no class folders; images go to {folders['train'].name}/CLASS/")
    notes = []
    for split, here in found.items():
        if not here:
            raise DataError(f"{folders[split]}: no class folders; images go to {split}/CLASS/, or remove this folder")
        for name, scan in here.items():
            if name not in found["train"]:
                example = f", for example {scan.files[0]}" if scan.files else ""
                raise DataError(f"{folders[split] / name}: class {name!r} is in {split} but not in train{example}")
            if not scan.files:
                other = f" (though other files, for example {scan.ignored[0].name})" if scan.ignored else ""
                raise DataError(f"{folders[split] / name}: this class has no images{other}; add some or remove it")
        ignored = [path for scan in here.values() for path in scan.ignored]
        if ignored:
            first = ignored[0].relative_to(top)
            notes.append(f"{len(ignored)} files in {split} are no images by their ending (first: {first})")
        absent = [name for name in classes if name not in here]
        if absent:
            notes.append(f"{len(absent)} classes have no image in {split} (first: {absent[0]})")
    splits = {split: _samples(top, classes, here) for split, here in found.items()}
    return Source(str(top), classes, splits, notes=tuple(notes))


def _other_case(name: str, beside: list[str]) -> str | None:
    """The split that `Train` beside `Test` was meant to be; alone among classes it may be a class, trains exist."""
    meant = [other for other in beside if other.lower() in SPLITS]
    return name.lower() if name.lower() in SPLITS and name not in SPLITS and len(meant) > 1 else None


def natural_key(text: str) -> tuple[list[tuple[int, int, str]], str]:
    """Sorts numbers inside names by value.

    >>> sorted(["b10", "b9", "a"], key=natural_key)
    ['a', 'b9', 'b10']
    """
    parts = re.findall(r"\d+|\D+", text.casefold())
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts], text


@dataclass
class _Scan:
    files: list[Path] = field(default_factory=list)
    sizes: list[str] = field(default_factory=list)
    ignored: list[Path] = field(default_factory=list)


def _classes(folder: Path) -> dict[str, _Scan]:
    endings = _endings()
    classes: dict[str, _Scan] = {}
    for entry in sorted(_listing(folder), key=lambda e: natural_key(e.name)):
        if entry.is_dir():
            classes[entry.name] = _scan(folder / entry.name, endings)
        elif os.path.splitext(entry.name)[1].lower() in endings:
            raise DataError(f"{folder / entry.name}: an image outside any class; move it to {folder.name}/CLASS/")
    return classes


def _scan(folder: Path, endings: frozenset[str]) -> _Scan:
    scan = _Scan()
    # A link that leads back above the class would bring in every other class under this one's label.
    above = {_identity(parent) for parent in (folder.parent, folder.parent.parent)}
    for path in _walk(folder, above):
        if path.suffix.lower() not in endings:
            scan.ignored.append(path)
            continue
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}); repair or remove it") from error
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path}: not a regular file; remove it")
        if status.st_size == 0:
            raise DataError(f"{path}: the file is empty; repair or remove it")
        scan.files.append(path)
        scan.sizes.append(f"{status.st_size}:{status.st_mtime_ns}")
    return scan


def _walk(folder: Path, seen: set[tuple[int, int]]) -> Iterator[Path]:
    """Files below a folder in natural order; links are followed, each folder once, so that a loop ends."""
    identity = _identity(folder)
    if identity in seen:
        return
    seen.add(identity)
    for entry in sorted(_listing(folder), key=lambda e: natural_key(e.name)):
        if entry.is_dir():
            yield from _walk(folder / entry.name, seen)
        else:
            yield folder / entry.name


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _listing(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [e for e in entries if not e.name.startswith(".") and e.name.lower() not in _LITTER]
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror}); check its permissions") from error


def _endings() -> frozenset[str]:
    from PIL import Image as pillow

    return frozenset(ending for ending, kind in pillow.registered_extensions().items() if kind in pillow.OPEN)


def _samples(top: Path, classes: tuple[str, ...], found: dict[str, _Scan]) -> Samples:
    files = [file for name in classes if name in found for file in found[name].files]
    stamps = [size for name in classes if name in found for size in found[name].sizes]
    labels = np.repeat(np.arange(len(classes)), [len(found[name].files) if name in found else 0 for name in classes])

    def open_image(index: int) -> Image:
        from PIL import Image as pillow

        return pillow.open(files[index])

    return Samples([file.relative_to(top).as_posix() for file in files], labels.astype(np.int64), stamps, open_image)
