"""The hardware side: which code a GPU runs, and the format of the tables that tune it.

`target` is the switch between Hopper and SM80 code, `kernels` the one table of kernels, `config`
reads the tables of their configurations, `conditions` has the tables' conditions, `splits` chooses
the splits of a decode, and `ptx` holds the PTX that both sides share.
"""
