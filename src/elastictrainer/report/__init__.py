"""Figures and one self-contained HTML page from a run folder, or from several."""

from elastictrainer.report.comparison import write_comparison
from elastictrainer.report.plots import write_plots
from elastictrainer.report.pngs import write_pngs
from elastictrainer.report.run_page import write_report

__all__ = ["write_comparison", "write_plots", "write_pngs", "write_report"]
