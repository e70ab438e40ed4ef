"""The hardware side: which code a GPU runs, and the tables that tune it."""
