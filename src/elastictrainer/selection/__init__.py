"""The best plan within a budget: exact on the real graph, pure, in milliseconds."""

from __future__ import annotations

from elastictrainer.selection.channels import affordable, select_channels
from elastictrainer.selection.pins import Pin, pinned
from elastictrainer.selection.planning import select

__all__ = ["Pin", "affordable", "pinned", "select", "select_channels"]
