"""Who may import what, seen from a fresh interpreter."""

import subprocess
import sys

import pytest

GROUND = ", ".join(
    f"twin_attention.{module}"
    for module in (
        "contract.cost", "contract.explain", "contract.paged_spec", "contract.reference.kinds",
        "contract.reference.paged", "contract.reference.partial", "contract.reference.rotary",
        "contract.spec", "contract.tolerances",
        "contract.validate.attention", "contract.validate.block_mask",
        "contract.validate.context", "contract.validate.dilated", "contract.validate.errors",
        "contract.validate.layers", "contract.validate.merge", "contract.validate.offsets",
        "contract.validate.operands", "contract.validate.options", "contract.validate.paged",
        "contract.validate.pool",
        "targets.config", "targets.describe", "targets.family", "targets.ptx", "targets.target",
    )
)  # fmt: skip


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        (GROUND, {"jax", "torch", "triton"}),
        ("torch_attn", {"jax", "pallas_attn", "transformers", "torch_attn.adapters",
         "triton"} | {"torch._dynamo", "torch.distributed.tensor", "torch.utils.flop_counter"}),
        ("pallas_attn", {"torch", "triton", "flax", "torch_attn",
         "pallas_attn.adapters"} | {"jax.experimental.mosaic.gpu"}),
    ],
    ids=["ground", "torch_attn", "pallas_attn"],
)  # fmt: skip
def test_importing_stays_on_its_side(modules, forbidden):
    """It is light as well: it imports no compiler, and nothing that few calls need."""
    script = f"import sys, {modules}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not forbidden & set(run.stdout.split())


@pytest.mark.parametrize(
    ("module", "missing", "install"),
    [
        ("pallas_attn.modules", "flax", "twin-attention[models]"),
        ("torch_attn.adapters.transformers", "transformers", "transformers>=5.23"),
    ],
)
def test_a_missing_package_is_named_with_how_to_install_it(module, missing, install):
    program = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == {missing!r}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Missing())
import {module}
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stderr.rstrip().endswith(f"pip install '{install}'")
