"""Judge kernel configurations without a GPU (`static`); search for faster ones (`search`)."""
