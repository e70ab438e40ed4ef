"""Report records: tables, plots, a summary in markdown, and a page with everything."""
