"""Which tensors are scored: names as people give them, parameters as the optimizer holds them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from elastictrainer.errors import ConfigError
from elastictrainer.runtime.apply import unwrap
from elastictrainer.runtime.optimizer_copy import look_through

__all__ = ["candidates"]


def candidates(model: nn.Module, optimizer: Optimizer, names: Iterable[str] | None) -> dict[str, nn.Parameter]:
    """The asked tensors by name, or every tensor of the model that the optimizer holds, resting or not.

    A tied tensor stands once, under its first name, unless it is asked for by another.

    Raises:
        ConfigError: no tensor is left, or a name is unknown, cannot have a gradient, or is not in the optimizer: it
            would be bought with the budget and never move.
    """
    held = {p for group in look_through(optimizer).param_groups for p in group["params"]}
    inner = unwrap(model)
    if names is None:
        found = {n: p for n, p in inner.named_parameters() if p in held and _has_gradient(p)}
        if not found:
            raise ConfigError("the optimizer holds none of the model's parameters; build it from model.parameters()")
        return found
    if isinstance(names, str):
        raise ConfigError(f"names is the one string {names!r}; write [{names!r}]")
    known = dict(inner.named_parameters(remove_duplicate=False))
    asked = list(dict.fromkeys(names))
    if not asked:
        raise ConfigError("names is empty, so there is nothing to score; leave it out to score every tensor")
    wrong = (
        ("are no parameters of the model", [n for n in asked if n not in known]),
        ("hold integers and have no gradient", [n for n in asked if n in known and not _has_gradient(known[n])]),
        (
            "are not in the optimizer, so they would never move",
            [n for n in asked if n in known and known[n] not in held],
        ),
    )
    for problem, which in wrong:
        if which:
            more = f" and {len(which) - 5} more" if len(which) > 5 else ""
            raise ConfigError(f"{', '.join(which[:5])}{more} {problem}; names are those of model.named_parameters()")
    return {name: known[name] for name in asked}


def _has_gradient(parameter: nn.Parameter) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()
