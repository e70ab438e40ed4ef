"""Let tests that lower kernels compile none of them."""

import pytest

from pallas_attn import ahead


@pytest.fixture(autouse=True)
def _compiled_by_xla_alone(monkeypatch):
    """Start no thread that compiles: most kernels of these tests are lowered and never run."""
    monkeypatch.setattr(ahead, "compiled_for", lambda: None)
