"""Who may import what, seen from a fresh interpreter."""

import subprocess
import sys

import pytest

CONTRACT = ", ".join(
    f"interop.contract.{module}"
    for module in (
        "cases", "config", "cost", "explain", "reference", "spec", "target",
        "tolerances", "validate",
    )
)  # fmt: skip


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        (CONTRACT, {"jax", "torch", "triton"}),
        ("torch_attn", {"jax", "pallas_attn"}),
        ("pallas_attn", {"torch", "triton", "torch_attn"}),
    ],
    ids=["contract", "torch_attn", "pallas_attn"],
)
def test_importing_stays_on_its_side(modules, forbidden):
    script = f"import sys, {modules}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not forbidden & set(run.stdout.split())
