"""Other libraries' attention calls on `pallas_attn`. Each module is imported by its own name."""
