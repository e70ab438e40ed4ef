"""Choose the code that a GPU runs, and the tables that tune it."""
