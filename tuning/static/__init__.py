"""What the compiler makes of every shipped configuration, without a GPU.

``resources`` reads a compiled kernel; ``triton_aot`` and ``pallas_aot`` compile the kernels of one
problem; ``bound`` counts a tile on paper; ``gate`` compiles every shipped configuration and says
what is wrong with it; ``command`` is ``python -m tuning static``.
"""
