"""Comparisons: a grid of runs on equal terms, run cell by cell, and what came of it in one table."""

from elastictrainer.compare.grid import SHORTER, Cell, Grid, Method, Workload
from elastictrainer.compare.runner import Comparison, Outcome

__all__ = ["SHORTER", "Cell", "Comparison", "Grid", "Method", "Outcome", "Workload"]
