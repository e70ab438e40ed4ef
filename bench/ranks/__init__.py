"""Ranks of context parallel attention."""
