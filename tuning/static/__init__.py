"""Judge every shipped configuration by its compiled code, without a GPU.

``resources`` reads a compiled kernel; ``triton_aot`` and ``pallas_aot`` compile the kernels of one
problem; ``bound`` counts a tile on paper; ``gate`` compiles every shipped configuration and
lists why it fails; ``command`` is ``python -m tuning static``.
"""
