"""Which tensors a pin means."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from elastictrainer.errors import ConfigError
from elastictrainer.profiling.profile import Profile

__all__ = ["Pin", "pinned"]

Pin = str | Iterable[str] | Callable[[str], bool]


def pinned(profile: Profile, pin: Pin) -> tuple[str, ...]:
    """The tensors that a pin means, in backward order: a name, a pattern like `"layer4.*"`, several, or a test.

    `"head"` is the output-most layer (`Graph.head`). A name that stands in the profile is meant as it stands, whatever
    characters it has.

    Raises:
        ConfigError: a name, pattern or test that fits no tensor: a pin that was meant and does nothing helps nobody.
    """
    if callable(pin):
        passed = profile.select_names(pin)
        if not passed:
            raise ConfigError(f"pin {pin!r} is true of no tensor of this profile; () pins nothing")
        return passed
    patterns = [pin] if isinstance(pin, str) else list(pin) if isinstance(pin, Iterable) else [pin]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(
            f"pin {pin!r} is neither a name or pattern, nor several, nor a test of names; () pins nothing"
        )
    found: set[str] = set()
    for pattern in patterns:
        if pattern in profile.graph.index:
            matches: tuple[str, ...] = (pattern,)
        elif pattern == "head":
            matches = profile.graph.head
        else:
            matches = profile.select_names(lambda name, pattern=pattern: fnmatchcase(name, pattern))  # type: ignore[misc]
        if not matches:
            raise ConfigError(
                f"pin {pattern!r} fits no tensor of this profile; write 'head', a name or a pattern like 'layer4.*'"
            )
        found.update(matches)
    return tuple(name for name in profile.names if name in found)
