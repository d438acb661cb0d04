"""The run folder: everything a run leaves behind, in files that outlive this library.

runs/birds/
  config.yaml         what was asked: every option, the model and data, versions; a file for --config too
  metrics.jsonl       a line an epoch
  plans.jsonl         a line a re-plan: the plan, why it was made, the scores
  profile.json        the price list that plans were made from
  result.json         the outcome; its presence means that the run has ended
  diverged.json       instead of it: the loss, a gradient or a weight was not finite, and where
  model.safetensors   the weights to use: best on validation, or the last ones where there is none
  last.safetensors    the last weights, where those are others
  checkpoint/         to go on from; see runtime/checkpoint.py
  report.html         for people
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from elastictrainer.errors import CheckpointError
from elastictrainer.runtime.checkpoint import (
    Checkpoints,
    load_tensors,
    reason,
    save_tensors,
    sync_folder,
    write_atomically,
)

__all__ = ["DIVERGED", "RunFolder"]

LOGS = ("metrics.jsonl", "plans.jsonl")
DIVERGED = "diverged.json"


class RunFolder:
    """One run's folder, held by one process at a time. Use `create` or `reopen`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoint")
        self._lock = _hold(path)

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any], *, environment: Mapping[str, Any]) -> RunFolder:
        """Begin a run; an existing run is never overwritten.

        Raises:
            CheckpointError: something is there already, or the folder cannot be made.
        """
        path = Path(path)
        document = {**config, "environment": dict(environment)}
        try:
            path.mkdir(parents=True, exist_ok=True)
            with cls._held(path) as folder:
                # A kill while the file below was being written leaves a folder in which no run has begun.
                if any(entry.name != "config.yaml.tmp" for entry in path.iterdir()):
                    raise CheckpointError(
                        f"{path} is not empty and nothing is overwritten; "
                        "use resume (--resume) or choose another folder"
                    )
                write_atomically(path / "config.yaml", yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
        except OSError as error:
            raise CheckpointError(f"cannot begin a run in {path}: {reason(error)}") from error
        return folder

    @classmethod
    def reopen(cls, path: str | Path, config: Mapping[str, Any], *, environment: Mapping[str, Any]) -> RunFolder:
        """Go on with a run, or begin it where there is none yet, so that one command line serves both.

        The environment may have changed (another torch, another machine), and how it was asked for (`command`: the same
        in other words, or with other threads); what shapes the run may not.

        Raises:
            CheckpointError: the run there was asked for with other options; all that differ are listed.
        """
        path = Path(path)
        if not (path / "config.yaml").exists():
            return cls.create(path, config, environment=environment)
        with cls._held(path) as folder:
            try:
                before = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
                asked = yaml.safe_load(yaml.safe_dump(dict(config), sort_keys=False))
            except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
                raise CheckpointError(f"{path / 'config.yaml'} cannot be read: {reason(error)}") from error
            before = before if isinstance(before, dict) else {}
            differ = [
                f"{key} was {before.get(key)!r}, now {asked.get(key)!r}"
                for key in asked
                if before.get(key) != asked.get(key) and key != "command"
            ]
            if differ:
                raise CheckpointError(
                    f"{path} holds another run: {'; '.join(differ)}; ask for the same, or choose another folder"
                )
            (path / DIVERGED).unlink(missing_ok=True)  # it is being tried again
        return folder

    @classmethod
    @contextmanager
    def _held(cls, path: Path) -> Iterator[RunFolder]:
        """The folder, held on to afterwards unless what is inside fails: a refusal leaves nothing locked."""
        folder = cls(path)
        try:
            yield folder
        except BaseException:
            folder.close()
            raise

    def close(self) -> None:
        """Let other processes have the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # -- logs --------------------------------------------------------------------------------------------------------

    def log(self, name: str, record: Mapping[str, Any]) -> None:
        """Append one line to a log.

        Raises:
            CheckpointError: it cannot be written, as on a full disk.
        """
        try:
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise CheckpointError(
                f"{self.path / name} cannot be written: {reason(error)}; the last checkpoint is kept"
            ) from error

    def log_lengths(self) -> dict[str, int]:
        """How long the logs are now: part of a checkpoint."""
        return {name: (self.path / name).stat().st_size if (self.path / name).exists() else 0 for name in LOGS}

    def wind_back(self, lengths: Mapping[str, int]) -> None:
        """Cut from the logs what was written after the checkpoint: it is about to happen again."""
        for name in LOGS:
            if (self.path / name).exists():
                os.truncate(self.path / name, min(lengths.get(name, 0), (self.path / name).stat().st_size))

    # -- files -------------------------------------------------------------------------------------------------------

    def write_json(self, name: str, document: Mapping[str, Any]) -> None:
        self._write(name, json.dumps(document, indent=2) + "\n")

    def write_text(self, name: str, text: str) -> None:
        self._write(name, text)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A document of the run, or None where it is not there."""
        try:
            document: dict[str, Any] = json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path / name} cannot be read: {reason(error)}") from error
        return document

    def write_weights(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Replace a weights file in one moment."""
        path = self.path / name
        aside = path.with_name(path.name + ".tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_tensors(tensors, aside, metadata=dict(metadata))
            os.replace(aside, path)
            sync_folder(path.parent)
        except Exception as error:  # safetensors has its own error for what the system refuses
            aside.unlink(missing_ok=True)
            raise CheckpointError(f"{path} cannot be written: {reason(error)}; the last checkpoint is kept") from error

    def read_weights(self, name: str) -> dict[str, Tensor]:
        return load_tensors(self.path / name)

    def _write(self, name: str, text: str) -> None:
        try:
            write_atomically(self.path / name, text)
        except OSError as error:
            raise CheckpointError(
                f"{self.path / name} cannot be written: {reason(error)}; the last checkpoint is kept"
            ) from error


def _hold(path: Path) -> int | None:
    """Keep other processes out until this one ends, however it ends: the system drops the lock with the process."""
    try:
        import fcntl
    except ImportError:  # Windows: no advisory locks of this kind
        return None
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise CheckpointError(f"another process is training in {path}; wait for it, or choose another folder") from None
    except OSError:  # a file system without locks
        os.close(handle)
        return None
    return handle
