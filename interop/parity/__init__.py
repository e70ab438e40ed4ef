"""Compare both implementations on the same tensors, with one error budget.

Its command makes each case's tensors in torch, shares them with JAX, compares every output and
gradient with the float64 oracle and with the twin's, and writes ``parity.json`` and
``parity.html``.
"""
