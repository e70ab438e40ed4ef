"""Kernels across the frameworks: of `torch_attn` in JAX, and of `pallas_attn` in PyTorch.

The sides know only `in_jax` and `in_torch`, which import the other framework when asked for a
kernel. `torch_host` and `jax_host` describe what a side's host function does, as a `plan.Plan`, and
`run_in_jax` and `run_in_torch` run it. `cubin` and `triton_call` compile and launch kernels of
Triton and Gluon in JAX, and `mosaic` those of Mosaic GPU in PyTorch.
"""
