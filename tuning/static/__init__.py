"""Judge every shipped configuration by its compiled code, without a GPU.

``resources`` reads a compiled kernel; ``triton_aot``, ``pallas_aot`` and ``mosaic_aot`` compile a
problem's kernels; ``bound`` estimates a tile's time; ``gate`` compiles every shipped configuration
and lists failures.
"""
