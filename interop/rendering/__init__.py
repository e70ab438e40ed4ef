"""Render reports: tables, plots and one self-contained HTML page."""
