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


# Without a package, a module says how to install it.
WITHOUT = """
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == {0!r}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Missing())
import {1}
"""


@pytest.mark.parametrize(
    ("modules", "forbidden", "missing", "module", "install"),
    [
        (GROUND, {"jax", "torch", "triton"}, None, None, None),
        ("torch_attn", {"jax", "pallas_attn", "transformers", "torch_attn.adapters",
         "triton"} | {"torch._dynamo", "torch.distributed.tensor", "torch.utils.flop_counter"},
         "transformers", "torch_attn.adapters.transformers", "transformers>=5.23"),
        ("pallas_attn", {"torch", "triton", "flax", "torch_attn",
         "pallas_attn.adapters"} | {"jax.experimental.mosaic.gpu"},
         "flax", "pallas_attn.modules", "twin-attention[models]"),
    ],
    ids=["ground", "torch_attn", "pallas_attn"],
)  # fmt: skip
def test_importing_is_light_and_stays_on_its_side(modules, forbidden, missing, module, install):
    script = f"import sys, {modules}; print(*sys.modules)"
    script += WITHOUT.format(missing, module) if missing else ""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert modules.split(", ")[0] in run.stdout.split(), run.stderr
    assert not forbidden & set(run.stdout.split())
    assert run.stderr.rstrip().endswith(f"pip install '{install}'" if missing else "")
    assert (run.returncode == 0) == (missing is None)
