"""Argument checks, with the same messages on both sides."""
