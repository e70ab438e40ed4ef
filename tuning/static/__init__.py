"""Compile every shipped configuration, without a GPU, and list failures (``gate``)."""
