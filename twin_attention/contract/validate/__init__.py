"""Argument checks, with the same messages on both sides; `errors` says which errors they raise."""
