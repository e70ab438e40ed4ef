"""Judge every shipped configuration by its compiled code, without a GPU.

``gate`` compiles every shipped configuration and lists failures; ``bound`` estimates a tile's time.
"""
