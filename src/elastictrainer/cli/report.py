"""`elastictrainer report`: a page of one run, or of several side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from elastictrainer.cli import options
from elastictrainer.cli.app import app
from elastictrainer.cli.output import Output

__all__ = ["report"]


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; several make a comparison.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="The page to write, over an older one; else report.html in the run's folder.",
            rich_help_panel="Output",
        ),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option("--plots", help="Also write every figure into this folder, as SVG.", rich_help_panel="Output"),
    ] = None,
    png: Annotated[
        bool,
        typer.Option("--png", help="With --plots: as PNG, too, drawn by Chromium or Chrome.", rich_help_panel="Output"),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Make a page of a run, or of several side by side.

    One HTML file that needs nothing and opens anywhere. `train` leaves a report in its folder by itself; this makes it
    again, also of a run that is still going on. Several runs are grouped by what they were trained with, seeds
    together.

    \b
    elastictrainer report runs/birds
    elastictrainer report runs/full runs/elastic --out runs/comparison.html --plots figures/
    """
    from elastictrainer.errors import ConfigError
    from elastictrainer.report import write_comparison, write_plots, write_pngs, write_report

    if png and plots is None:
        raise ConfigError("--png needs --plots, the folder to write figures into")
    screen = Output(as_json)
    if len(runs) == 1:
        page = write_report(runs[0], out)
    elif out is None:
        raise ConfigError("--out is needed: a page of several runs belongs to none of their folders")
    else:
        page = write_comparison(runs, out)
    screen.say(f"report: {page}")
    drawn = write_plots(page, plots) if plots is not None else []
    if png:
        drawn = [*drawn, *write_pngs(drawn)]
    if plots is not None:
        screen.say(f"figures: {len(drawn)} in {plots}")
    screen.document({"report": str(page), "figures": [str(path) for path in drawn]})
