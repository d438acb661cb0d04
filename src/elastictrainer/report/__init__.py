"""Figures and one self-contained HTML page from a run folder."""
