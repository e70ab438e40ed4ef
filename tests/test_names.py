import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# How many classes still share a name. No name is added, and no number grows.
EXCEPTIONS = {
    # transformers' mask, which its users may import; what one kernel's functions share; pairs, in
    # the library and in register layouts
    "torch_attn": {"Mask": 2, "Kernel": 3, "Rows": 2, "Tiles": 2},
    # what one kernel's functions share
    "pallas_attn": {
        "Consumers": 2, "Inputs": 3, "Kernel": 4, "Keys": 3, "List": 2, "Memory": 5, "Outputs": 5,
        "Queries": 3, "Rows": 6, "Step": 3, "Tiles": 2, "Work": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "package", ["twin_attention", "torch_attn", "pallas_attn", "interop", "bench", "tuning"]
)
def test_a_class_name_means_one_thing(package):
    names = Counter(
        node.name.lstrip("_")
        for file in (ROOT / package).rglob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    allowed = EXCEPTIONS.get(package, {})
    assert {x: n for x, n in names.items() if n > allowed.get(x, 1)} == {}
