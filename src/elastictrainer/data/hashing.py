"""Randomness by counter: a number that depends on (seed, epoch, sample) alone, the same on every machine and version.

A stateful generator would tie an image's crop to how many images came before it, and a resumed run would have to
replay them. numpy's generators also promise no stable streams between versions. SplitMix64's finaliser is fixed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["keys", "mix", "permutation", "uniform"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: a bijection of 64-bit numbers in which every output bit depends on every input bit."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def keys(seed: int, epoch: int | NDArray[np.int64], samples: NDArray[np.int64]) -> NDArray[np.uint64]:
    """One 64-bit key a sample; `epoch` is one for all, or one for each."""
    # Arrays of one, since numpy's 64-bit scalars warn when they wrap and arrays do not.
    start = np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
    turn = np.atleast_1d(np.asarray(epoch, dtype=np.int64)).astype(np.uint64)
    key = mix(mix(start + _GOLDEN) + _GOLDEN * (turn + np.uint64(1)))
    return mix(key + _GOLDEN * (samples.astype(np.uint64) + np.uint64(1)))


def uniform(
    seed: int, epoch: int | NDArray[np.int64], samples: NDArray[np.int64], *, stream: int
) -> NDArray[np.float64]:
    """Numbers in [0, 1), one a sample; different streams are independent."""
    drawn = mix(keys(seed, epoch, samples) + _GOLDEN * np.array([stream + 1], dtype=np.uint64))
    return (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """The order of an epoch. Costs one sort.

    >>> sorted(permutation(0, 1, 5).tolist())
    [0, 1, 2, 3, 4]
    """
    return np.argsort(keys(seed, epoch, np.arange(count, dtype=np.int64)), kind="stable").astype(np.int64)
