"""The machine: which code a GPU runs, and the format of the tables that tune it.

`target` is the switch between Hopper and SM80 code, `config` reads the tables of kernel
configurations and chooses splits, `ptx` holds the machine code that both sides share.
"""
