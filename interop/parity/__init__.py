"""The parity harness: both implementations on the same tensors, with one error budget.

``python -m interop.parity`` makes each case's tensors once, in torch, hands them to JAX through
`interop.exchange`, runs both frameworks, compares every output and gradient with the float64
oracle and with its twin, and writes ``parity.json`` and ``parity.html``.
"""
