"""From records: tables, plots, and a page that holds both."""
