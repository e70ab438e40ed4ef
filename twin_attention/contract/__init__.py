"""The contract that `pallas_attn` and `torch_attn` both keep. Nothing here imports a framework."""
