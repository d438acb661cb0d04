"""Which batches a probe looks at: those that make the update, and those that its gradient comes from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset

from elastictrainer.data.hashing import permutation
from elastictrainer.data.loader import Loader
from elastictrainer.errors import ConfigError, DataError
from elastictrainer.importance import Importance, find_importance
from elastictrainer.policies import find_policy
from elastictrainer.runtime.feed import Feed, to_device
from elastictrainer.runtime.streams import Stream

__all__ = ["GradientFrom", "ProbeBatches", "check_source", "source_of"]

GradientFrom = Literal["same", "other"] | Iterable[Any]
_STREAM = 7_919  # held-out samples are drawn by the run's seed, and in no order that its data have


class ProbeBatches:
    """The batches of a run's probes, by where the gradient is to come from.

        draw = ProbeBatches("other", count=6, seed=0, device=device)
        update, gradient = draw.divided(ahead.peek(draw.ahead), step=40)

    `"same"`: from the batches that make the update. `"other"`: from as many that come after them. A loader: from as
    many batches of samples drawn from all of it, held out from training; other ones at every probe.

    What is drawn depends on the seed and on the step of the probe alone: nothing has to be kept in a checkpoint, and no
    random stream is touched.

    Raises:
        ConfigError: neither of these, or a loader without a length, all of which nothing could be drawn from.
    """

    def __init__(self, gradient_from: GradientFrom, *, count: int, seed: int, device: torch.device) -> None:
        if count < 1:
            raise ConfigError(f"probe_batches {count} must be at least 1")
        if isinstance(gradient_from, str) and gradient_from not in ("same", "other"):
            hint = ": pass the loader of what is held out" if gradient_from == "held_out" else ""
            raise ConfigError(f"gradient_from {gradient_from!r} is neither 'same', 'other' nor a loader{hint}")
        self.held_out = None if isinstance(gradient_from, str) else gradient_from
        if self.held_out is not None and _length(self.held_out) < 1:
            raise ConfigError("gradient_from: the held-out loader holds no batch")
        self.kind = gradient_from if isinstance(gradient_from, str) else "held_out"
        self.count, self._seed, self._device = count, seed, device

    def check(self, importance: Importance | None) -> None:
        """Refuse what would change nothing: importance that is measured on no data, or not at all (None)."""
        if self.kind == "same":
            return
        if importance is None:
            raise ConfigError(f"gradient_from is {self.kind!r}, and this policy measures no importance; leave it out")
        if not importance.needs_batches:
            raise ConfigError(
                f"gradient_from is {self.kind!r}, and importance {importance.name!r} takes no gradient; leave it out"
            )

    @property
    def ahead(self) -> int:
        """How many of the batches that are trained on next a probe looks at."""
        return 2 * self.count if self.kind == "other" else self.count

    @property
    def steps(self) -> int:
        """What a batch that makes an update costs, its part of the gradient included, in about so many full steps."""
        return 1 if self.kind == "same" else 2

    @property
    def least(self) -> int:
        """Batches without which there can be no probe."""
        return 2 if self.kind == "other" else 1

    def divided(self, batches: list[Any], *, step: int) -> tuple[list[Any], list[Any] | None]:
        """The batches for the update and those for the gradient; None where they are the same."""
        if self.kind == "same":
            return batches, None
        if self.held_out is not None:
            return batches, self._drawn(self.held_out, len(batches), step=step)
        if len(batches) < 2:
            raise DataError(
                "gradient_from='other' needs two batches ahead, one for the update and one for the gradient, and there "
                "is one; use a smaller batch size, or gradient_from='same'"
            )
        half = -(-len(batches) // 2)
        return batches[:half], batches[half:]

    def _drawn(self, loader: Iterable[Any], count: int, *, step: int) -> list[Any]:
        seed = self._seed + _STREAM
        with Stream((seed * 1_000_003 + step) % 2**63).current():
            try:
                return [to_device(batch, self._device) for batch in _draw(loader, count, seed=seed, step=step)]
            except FileNotFoundError as error:
                raise DataError(f"{error.filename or error}: it was there when training began and is gone") from error


def source_of(gradient_from: Any, *, held_out: Iterable[Any] | None) -> GradientFrom:
    """What `fit` was asked for, as the controller takes it: `"held_out"` is the validation's loader.

    >>> source_of("held_out", held_out=[1, 2]), source_of("other", held_out=None)
    ([1, 2], 'other')
    """
    if not (isinstance(gradient_from, str) and gradient_from == "held_out"):
        return gradient_from  # type: ignore[no-any-return]  # of anything else the controller says what is wrong
    if held_out is None:
        raise ConfigError("gradient_from='held_out' draws from the val_loader, and there is none; pass one")
    return held_out


def check_source(deciding: Mapping[str, Any], *, held_out: Iterable[Any] | None, steps_per_epoch: int | None) -> None:
    """Refuse here what would be refused later, when there is a run folder already."""
    policy = find_policy(deciding["policy"])
    source = source_of(deciding["gradient_from"], held_out=held_out)
    draw = ProbeBatches(source, count=deciding["probe_batches"], seed=0, device=torch.device("cpu"))
    importance = find_importance(policy.importance or deciding["importance"] or "elastic")
    draw.check(importance if policy.needs_scores else None)
    if policy.needs_scores and steps_per_epoch is not None and steps_per_epoch < draw.least:
        draw.divided([None] * steps_per_epoch, step=0)


def _draw(loader: Iterable[Any], count: int, *, seed: int, step: int) -> Iterator[Any]:
    """So many batches of a loader, fairly: one that is not shuffled has its classes one after the other."""
    if isinstance(loader, Loader):
        some = permutation(seed, step, loader.num_samples)[: count * loader.batch_size]
        yield from loader.look(some, step)
        return
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler:
        # By its sampler, which may be all that divides this data set from what is trained on.
        divided = _undisturbed(loader)
        size = max(map(len, divided))
        samples = sorted(sample for batch in divided for sample in batch)
        chosen = [samples[i] for i in permutation(seed, step, len(samples))[: count * size]]
        for start in range(0, len(chosen), size):
            yield loader.collate_fn([loader.dataset[sample] for sample in chosen[start : start + size]])
        return
    places = sorted(permutation(seed, step, _length(loader))[:count].tolist())
    if hasattr(loader, "__getitem__"):
        yield from (loader[place] for place in places)
        return
    # Whatever else it is, it has to be gone through.
    feed = Feed(loader, epoch=step, start=0, seed=seed, device=torch.device("cpu"))
    yield from (batch for place, batch in enumerate(islice(feed, places[-1] + 1)) if place in places)


def _undisturbed(loader: DataLoader[Any]) -> list[list[Any]]:
    """The samples of a loader's batches; a generator that its sampler was given is left as it was."""
    generators = {
        id(found): found
        for holder in (loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
        if isinstance(found := getattr(holder, "generator", None), torch.Generator)
    }
    states = {key: generator.get_state() for key, generator in generators.items()}
    try:
        return [list(batch) for batch in loader.batch_sampler]  # type: ignore[union-attr]  # looked at by the caller
    finally:
        for key, generator in generators.items():
            generator.set_state(states[key])


def _length(loader: Iterable[Any]) -> int:
    try:
        return len(loader)  # type: ignore[arg-type]  # what has no length raises
    except TypeError:
        raise ConfigError(
            f"gradient_from: a held-out loader without a length ({type(loader).__name__}) cannot be drawn from fairly; "
            "pass a list of batches or a DataLoader"
        ) from None
