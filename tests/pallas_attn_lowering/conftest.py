"""Let tests that lower kernels compile none of them."""

import jax
import pytest

from pallas_attn import ahead


@pytest.fixture(autouse=True)
def _compiled_by_xla_alone(monkeypatch):
    """Start no thread that compiles: most kernels of these tests are lowered and never run."""
    monkeypatch.setattr(ahead, "compiled_for", lambda: None)


@pytest.fixture(autouse=True)
def _fresh_caches():
    jax.clear_caches()
    yield
    jax.clear_caches()
