"""The contract: what `pallas_attn` and `torch_attn` both promise.

`spec` holds the semantic rules, `validate` writes every error message about arguments, `reference`
is the array-API oracle, `tolerances` the error budget, `cost` the FLOPs and bytes, `explain` the
answer to which code a call runs. Nothing here imports a framework.
"""
