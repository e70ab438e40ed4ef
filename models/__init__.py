"""One decoder-only transformer, in PyTorch and in Flax, for examples, tests and benchmarks.

`torch_model` and `jax_model` are twins with one `config`; `weights` copies parameters.
"""
