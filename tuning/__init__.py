"""Judge kernel configurations without a GPU."""
