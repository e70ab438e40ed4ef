"""Which code a GPU runs, and the tables that tune it."""
