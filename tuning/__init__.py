"""Kernel configurations: what each takes, without a GPU (`static`); faster ones (`search`)."""
