import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

GROUND = ", ".join(
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for folder in ("contract", "targets")
    for file in sorted((ROOT / "twin_attention" / folder).rglob("[!_]*.py"))
)

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
         "transformers", "torch_attn.adapters.transformers", "transformers>=5.17"),
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


@pytest.mark.parametrize(
    ("package", "others", "expected"),
    [
        ("twin_attention", "torch_attn|pallas_attn|.*interop", set()),
        ("torch_attn", "pallas_attn|.*interop", set()),
        ("pallas_attn", "torch_attn|.*interop", {"twin_attention.interop.kernels.in_jax"}),
    ],
)
def test_strings_name_no_module_above_but_the_one_that_runs_kernels_elsewhere(
    package, others, expected
):
    """import-linter sees only statements, not what `import_module` is given."""
    found = set()
    for file in (ROOT / package).rglob("*.py"):
        tree = ast.parse(file.read_text())
        of_calls = {
            id(x)
            for call in ast.walk(tree)
            if isinstance(call, ast.Call) and "import" in ast.unparse(call.func)
            for x in ast.walk(call)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                pattern = rf"({others})(\.\w*)*" if id(node) in of_calls else rf"({others})(\.\w*)+"
                found |= {node.value} if re.fullmatch(pattern, node.value) else set()
    assert found == expected
