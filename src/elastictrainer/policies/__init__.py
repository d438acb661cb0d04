"""Policies: what yields plans over time. The registry is what `--policy` and `ls` know."""

from __future__ import annotations

import difflib

from elastictrainer.errors import ConfigError
from elastictrainer.policies.adaptive import ADAPTIVE
from elastictrainer.policies.baselines import BN_BIAS, FULL, HEAD, PRUNETRAIN, SUFFIX
from elastictrainer.policies.elastic import ELASTIC, RANDOM
from elastictrainer.policies.policy import Policy

__all__ = ["POLICIES", "Policy", "find_policy"]

POLICIES: dict[str, Policy] = {p.name: p for p in (ADAPTIVE, ELASTIC, FULL, HEAD, BN_BIAS, SUFFIX, RANDOM, PRUNETRAIN)}


def find_policy(policy: str | Policy) -> Policy:
    """A policy by its name, or the policy itself.

    Raises:
        ConfigError: no policy has this name; the nearest one is suggested.
    """
    if isinstance(policy, Policy):
        return policy
    if policy not in POLICIES:
        close = difflib.get_close_matches(policy, POLICIES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(POLICIES)}"
        raise ConfigError(f"no policy is called {policy!r}; {hint}")
    return POLICIES[policy]
