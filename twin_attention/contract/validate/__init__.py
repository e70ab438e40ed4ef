"""Argument checks, whose messages have one format on both sides."""
