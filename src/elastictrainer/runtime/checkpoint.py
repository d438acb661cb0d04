"""Checkpoints that survive `kill -9` at any moment: written aside, synced, renamed; two generations; no pickle.

checkpoint/
  save-00000007/            the generation before, whole until the next one is
    tensors.safetensors     every tensor: weights, buffers, optimizer, random streams
    state.json              everything else, with the tensors' places marked
    manifest.json           length and checksum of both; written last
  save-00000008/
  save-00000009.tmp/        what a kill leaves of a checkpoint half written; ignored, and cleared away
  best-3.safetensors        weights that a generation refers to; they go when no generation does
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from elastictrainer.errors import CheckpointError

__all__ = [
    "Checkpoints",
    "decode",
    "encode",
    "load_tensors",
    "reason",
    "save_tensors",
    "sync_folder",
    "write_atomically",
]

FORMAT = 1
KEPT = 2
_TENSORS, _STATE, _MANIFEST = "tensors.safetensors", "state.json", "manifest.json"


class Checkpoints:
    """The checkpoints of one run, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []
        """What `load` had to pass over, one line each."""
        self._damaged: list[Path] = []

    def save(self, state: Mapping[str, Any], *, refers_to: Iterable[str] = ()) -> Path:
        """Write a generation and, once it is whole, let go of all but the newest two and the files they refer to.

        Raises:
            CheckpointError: it could not be written; the generations before are untouched.

        Costs: the state once more in memory where tensors are on a device or not contiguous, and its size on disk
        three times for a moment.
        """
        kept = self.generations()
        final = self.folder / f"save-{_serial(kept[-1]) + 1 if kept else 1:08d}"
        aside = final.with_name(final.name + ".tmp")
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            skeleton, tensors = encode(state)
            save_tensors(tensors, aside / _TENSORS)
            _write(aside / _STATE, json.dumps({"format": FORMAT, "state": skeleton}).encode())
            sums = {name: _sum(aside / name) for name in (_TENSORS, _STATE)}
            manifest = {"format": FORMAT, "files": sums, "refers_to": list(refers_to)}
            _write(aside / _MANIFEST, json.dumps(manifest).encode())
            sync_folder(aside)
            os.rename(aside, final)
            sync_folder(self.folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            last = f"the one before ({kept[-1].name}) is kept" if kept else "there is no earlier one"
            raise CheckpointError(
                f"a checkpoint cannot be written to {self.folder}: {reason(error)}; {last}"
            ) from error
        self._let_go()
        return final

    def load(self) -> dict[str, Any] | None:
        """The newest state that is whole, or None where none was ever written.

        Raises:
            CheckpointError: there are checkpoints and none of them can be read.
        """
        self.notes, self._damaged = [], []
        for path in reversed(self.generations()):
            try:
                return self._read(path)
            except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
                self.notes.append(f"{path.name} is damaged: {reason(error)}")
                self._damaged.append(path)
        if self.notes:
            raise CheckpointError(
                f"{self.folder}: no checkpoint can be read ({'; '.join(self.notes)}); start again in another folder"
            )
        return None

    def generations(self) -> list[Path]:
        """The checkpoints that were written to the end, oldest first."""
        found = self.folder.glob("save-*") if self.folder.is_dir() else ()
        return sorted((path for path in found if path.name[5:].isdigit()), key=_serial)

    def _read(self, path: Path) -> dict[str, Any]:
        manifest = json.loads((path / _MANIFEST).read_bytes())
        for name, expected in manifest["files"].items():
            if _sum(path / name) != expected:
                raise ValueError(f"{name} is not what was written")
        missing = [name for name in manifest["refers_to"] if not (self.folder / name).exists()]
        if missing:
            raise ValueError(f"{missing[0]} is gone")
        document = json.loads((path / _STATE).read_bytes())
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']}, not {FORMAT}")
        state: dict[str, Any] = decode(document["state"], load_tensors(path / _TENSORS))
        return state

    def _let_go(self) -> None:
        for path in [*self.folder.glob("*.tmp"), *self._damaged, *self.generations()[:-KEPT]]:
            shutil.rmtree(path, ignore_errors=True)
        try:
            needed = {
                name for path in self.generations() for name in json.loads((path / _MANIFEST).read_bytes())["refers_to"]
            }
        except (OSError, ValueError, KeyError, TypeError):
            return  # a damaged generation does not say what it needs: all is kept until its turn to go has come
        for path in self.folder.glob("*.safetensors"):
            if path.name not in needed:
                path.unlink(missing_ok=True)


def _serial(path: Path) -> int:
    return int(path.name[5:])


# -- state as JSON and tensors ---------------------------------------------------------------------------------------


def encode(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split nested dicts, lists and scalars from the tensors in them. Shared tensors are kept once; no pickle.

    >>> encode({"lr": 0.1, 3: [torch.ones(2)]})[0]
    {'$items': [['lr', 0.1], [3, [{'$tensor': '0'}]]]}
    """
    tensors: dict[str, Tensor] = {}
    places: dict[tuple[Any, ...], str] = {}

    def walk(value: Any, path: str) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, np.ndarray):
            return {"$array": walk(torch.from_numpy(value.copy()), path)["$tensor"], "dtype": str(value.dtype)}
        if isinstance(value, Tensor):
            tensor = value.detach()
            place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            if tensor.numel() == 0 or place not in places:
                places[place] = str(len(tensors))
                tensors[places[place]] = tensor
            mark: dict[str, Any] = {"$tensor": places[place]}
            return mark if tensor.is_contiguous() else {**mark, "stride": list(tensor.stride())}
        if isinstance(value, Mapping):
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {key: walk(item, f"{path}.{key}") for key, item in value.items()}
            return {"$items": [[key, walk(item, f"{path}.{key}")] for key, item in value.items()]}
        if isinstance(value, tuple):
            return {"$tuple": [walk(item, f"{path}.{i}") for i, item in enumerate(value)]}
        if isinstance(value, (list, set, frozenset)):
            return [walk(item, f"{path}.{i}") for i, item in enumerate(value)]
        raise CheckpointError(
            f"{path.lstrip('.')} is a {type(value).__name__}, which a checkpoint without pickle cannot hold"
        )

    return walk(state, ""), tensors


def decode(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `encode`; memory formats such as channels_last are restored."""
    if isinstance(skeleton, list):
        return [decode(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if "$tensor" in skeleton:
        tensor = tensors[skeleton["$tensor"]]
        if "stride" not in skeleton:
            return tensor
        return torch.empty_strided(tensor.shape, skeleton["stride"], dtype=tensor.dtype).copy_(tensor)
    if "$array" in skeleton:
        return tensors[skeleton["$array"]].numpy().astype(skeleton["dtype"])
    if "$tuple" in skeleton:
        return tuple(decode(item, tensors) for item in skeleton["$tuple"])
    if "$items" in skeleton:
        return {key: decode(item, tensors) for key, item in skeleton["$items"]}
    return {key: decode(item, tensors) for key, item in skeleton.items()}


# -- files -----------------------------------------------------------------------------------------------------------


def save_tensors(tensors: Mapping[str, Tensor], path: Path, *, metadata: dict[str, str] | None = None) -> None:
    """Write tensors as safetensors and make sure that they are on the disk."""
    seen: set[int] = set()
    ready: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        held = tensor.detach().to("cpu").contiguous()
        # safetensors refuses tensors that share memory; a second name gets its own copy.
        ready[name] = held.clone() if held.untyped_storage().data_ptr() in seen else held
        seen.add(ready[name].untyped_storage().data_ptr())
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(ready, path, metadata=metadata)
    path.chmod(mode)  # as any new file's: safetensors makes files that nobody else may read
    _sync(path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read tensors written by `save_tensors`, on the CPU."""
    return load_file(path)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by another in one moment: a reader sees the old or the new, whole."""
    aside = path.with_name(path.name + ".tmp")
    try:
        _write(aside, text.encode())
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make renames inside the folder last through a power cut (where the system can)."""
    if os.name == "posix":
        _sync(path)


def reason(error: BaseException) -> str:
    """An operating system's reason without its errno."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sum(path: Path) -> list[int]:
    length, value = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            length += len(chunk)
            value = zlib.crc32(chunk, value)
    return [length, value]
