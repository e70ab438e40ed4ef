"""Building blocks of the kernels of every family: tiles, scores, softmax, sequences, masks, pages.

There is no kernel in it. Every family imports it; it imports none of them, and nothing of
`pallas_attn.kernels.explicit`.
"""
