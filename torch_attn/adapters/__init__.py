"""Other libraries' attention calls on `torch_attn`. Each module is imported by its own name."""
