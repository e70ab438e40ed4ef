"""The contract: what `pallas_attn` and `torch_attn` both promise.

`spec` holds the semantic rules, `validate` writes every error message about arguments,
`reference` is the array-API oracle, `tolerances` the error budget, `cost` the FLOPs and bytes,
`explain` what a call says about the code that it runs. Nothing here imports a framework.
"""
