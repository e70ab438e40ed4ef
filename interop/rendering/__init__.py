"""Render reports: tables, plots and one HTML page that needs nothing else."""
