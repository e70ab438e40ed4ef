"""The contract: what `pallas_attn` and `torch_attn` both promise.

Nothing below this package imports a framework. `spec` holds the semantic rules, `validate`
writes every error message about arguments, `reference` is the array-API oracle, `tolerances`
the error budget, `cost` the FLOPs and bytes, `cases` the named problems that tests, parity
and benchmarks share, `target` the switch between Hopper and SM80 code, `config` the format
of the tables of tuned configurations.
"""
