"""Weights from a local file into a model: read safely, matched by name, refused when more than the head differs."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from elastictrainer.errors import ConfigError, ModelError

__all__ = ["LoadReport", "align_names", "load_tensors", "one_line", "read_weights"]

Match = Literal["name", "order"]
PICKLED = (".pth", ".pt", ".bin", ".ckpt")
# What a training script calls the entry that holds the weights when a checkpoint holds several.
_NESTED = ("state_dict", "model_state_dict", "model")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What came out of a weights file.

    `fresh` are the tensors of the model that keep their random start (the head, when the classes differ); `mismatched`
    says why in words, one entry a tensor; `skipped` are the file's tensors that were left out on request.
    """

    loaded: int
    fresh: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.loaded:
            return "every tensor starts at random"
        parts = [f"{self.loaded} tensors loaded"]
        if self.cast:
            parts.append(f"{len(self.cast)} cast from another precision")
        if self.fresh:
            parts.append("freshly initialised: " + _some(self.mismatched or self.fresh))
        if self.skipped:
            parts.append("left out: " + _some(self.skipped))
        return "; ".join(parts)


def read_weights(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a `.safetensors` or `.pth` file, on the CPU, and its metadata (safetensors only).

    Pickled files are read with `weights_only=True`: a file that would run code is refused. Costs one read of the file
    and its size in memory.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ModelError(f"weights {str(path)!r}: no such file; give a .safetensors or .pth file, 'default' or nothing")
    if file.suffix == ".safetensors":
        return _read_safetensors(file)
    if file.suffix in PICKLED:
        return _read_pickled(file), {}
    raise ModelError(
        f"weights {str(path)!r}: ending {file.suffix!r} is unknown; use .safetensors or {', '.join(PICKLED)}"
    )


def align_names(own: Iterable[str], tensors: Mapping[str, Tensor], *, match: Match, origin: str) -> dict[str, Tensor]:
    """The file's tensors under the model's names.

    `match="name"` takes off what a wrapper put before every name (`module.`, `_orig_mod.`, `model.`), whichever prefix
    fits most names. `match="order"` says that the file's first tensor is the model's first, and so on, for a file whose
    author used other names for the same network; shapes are still checked one by one afterwards.
    """
    names = list(own)
    if match not in ("name", "order"):
        raise ConfigError(f"match {match!r} is unknown; use 'name' or 'order'")
    if match == "order":
        return _in_order(names, tensors, origin)
    anchor = max(names, key=len)
    prefixes = {name[: -len(anchor)] for name in tensors if name.endswith("." + anchor)}
    best = max(("", *sorted(prefixes)), key=lambda prefix: sum(prefix + name in tensors for name in names))
    return {name.removeprefix(best): tensor for name, tensor in tensors.items()}


def load_tensors(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    *,
    head: Iterable[str],
    skip: Sequence[str] = (),
    origin: str = "weights",
) -> LoadReport:
    """Copy `tensors` into `model`, cast to its precision; only tensors in `head` may be missing or of another shape.

    Args:
        tensors: by the model's own names (see `align_names`).
        head: tensors whose shape follows the number of classes; these keep their random start when they do not fit.
        skip: globs of the file's tensors to leave out; what they would have filled keeps its random start.

    Raises:
        ModelError: when anything but the head is missing, left over, of another shape, integers where the model has
            fractions, or not finite, by name. The model is untouched then.
    """
    own = dict(model.state_dict())
    unmatched = [pattern for pattern in skip if not any(fnmatchcase(name, pattern) for name in tensors)]
    if unmatched:
        raise ConfigError(
            f"skip {_some(unmatched)}: {origin} has no such tensor; its names look like {_some(list(tensors)[:3])}"
        )
    skipped = tuple(name for name in tensors if any(fnmatchcase(name, pattern) for pattern in skip))
    heads = set(head)
    problems: list[str] = []
    mismatched: list[str] = []
    fresh: list[str] = []
    ready: dict[str, Tensor] = {}
    for name, target in own.items():
        source = tensors.get(name)
        if name in skipped:
            fresh.append(name)
        elif source is None:
            # Files from before torch 0.4.1 and many converters have no such counter; it plays no part in the output.
            if name.endswith("num_batches_tracked"):
                continue
            (fresh if name in heads else problems).append(name if name in heads else f"{name} is missing")
        elif source.shape != target.shape:
            words = f"{name}: {tuple(source.shape)} in the file, {tuple(target.shape)} in the model"
            (mismatched if name in heads else problems).append(words)
            if name in heads:
                fresh.append(name)
        elif target.is_floating_point() and not source.is_floating_point():
            # Quantised weights mean nothing without their scales; cast to float they would train from garbage.
            problems.append(f"{name} holds {str(source.dtype).removeprefix('torch.')}, not floating-point numbers")
        elif not bool(torch.isfinite(source).all()):
            problems.append(f"{name} holds values that are not finite")
        else:
            ready[name] = source
    problems += [f"{name} has no place in the model" for name in tensors if name not in own and name not in skipped]
    if problems:
        raise ModelError(
            f"{origin} does not fit the model: {_some(problems)}; is it the right model name? "
            "Model options change how it is built, skip leaves tensors out by name"
        )
    if not ready:
        raise ModelError(
            f"{origin} gave the model no tensor at all: {len(skipped)} skipped, {len(mismatched)} of another shape"
        )
    cast = tuple(name for name, source in ready.items() if source.dtype != own[name].dtype)
    with torch.no_grad():
        for name, source in ready.items():
            own[name].copy_(source)
    return LoadReport(len(ready), tuple(fresh), tuple(mismatched), skipped, cast)


def _read_safetensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}, dict(opened.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"weights {str(file)!r} cannot be read as safetensors: {one_line(error)}; is the file complete?"
        ) from error


def _read_pickled(file: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # remarks on pickle protocols that nobody can act on
            content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelError(f"weights {str(file)!r} {_refused(error)}") from error
    except Exception as error:  # the restricted unpickler stumbles over garbage in many ways (KeyError, EOFError, ...)
        raise ModelError(f"weights {str(file)!r} cannot be read: {one_line(error)}; is the file complete?") from error
    found = _find_tensors(content)
    if not found:
        several = ", ".join(_sets(content))
        what = f"several sets of tensors ({several})" if several else f"a {type(content).__name__}"
        raise ModelError(
            f"weights {str(file)!r} hold no state dict (names to tensors), but {what}; save the model's alone"
        )
    return found


def _refused(error: Exception) -> str:
    """Why the restricted unpickler stopped: at the name of what is no tensor, or at bytes that mean nothing."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    if named:
        return (
            f"hold more than tensors ({named[1]}), and reading that could run code: refused; "
            "save model.state_dict() or a .safetensors file instead"
        )
    return (
        "are no state dict as torch.save writes it, and reading anything else could run code: refused; "
        "is the file complete, and no web page or Git LFS pointer in its place?"
    )


def _find_tensors(content: Any) -> dict[str, Tensor]:
    if not isinstance(content, Mapping):
        return {}
    if content and all(isinstance(value, Tensor) for value in content.values()):
        return {str(name): tensor for name, tensor in content.items()}
    nested = _sets(content)
    if len(nested) > 1:
        nested = {key: nested[key] for key in _NESTED if key in nested}
    return next(iter(nested.values()), {})


def _sets(content: Any) -> dict[str, dict[str, Tensor]]:
    """The state dicts directly inside, by key."""
    if not isinstance(content, Mapping):
        return {}
    return {str(key): found for key, value in content.items() if (found := _find_tensors(value))}


def _in_order(own: Sequence[str], tensors: Mapping[str, Tensor], origin: str) -> dict[str, Tensor]:
    if len(own) != len(tensors):
        raise ModelError(
            f"{origin} has {len(tensors)} tensors and the model {len(own)}: they cannot be matched in order"
        )
    return dict(zip(own, tensors.values()))


def _some(items: Sequence[str], most: int = 5) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def one_line(error: BaseException) -> str:
    """The first sentence of a library's error, for a message that must stay one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.split(r"(?<=[^.])\. ", text, maxsplit=1)[0].rstrip(".")[:200]
