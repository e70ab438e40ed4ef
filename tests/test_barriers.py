"""Inline PTX that no load may pass.

LLVM moves a load below inline PTX that does not say it touches memory. Below a barrier the memory
may have been overwritten.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EFFECTS = {"is_pure": False, "has_side_effects": True}
# PTX with effects that a load may pass.
PASSED = {
    "torch_attn": {
        "prefetch_carry": "brings memory to a cache",
        "draw_masks": "has registers alone, and is kept at its place",
    },
    "pallas_attn": {
        "branch": "has registers alone, and is kept at its place",
        "multiply": "asks other lanes",
        "_for_each_block": "writes what a copy reads, or adds to what no load of the kernel reads",
        "add": "adds to what no load of the kernel reads",
        "take_item": "adds to a counter",
    },
}


def instructions(package):
    """Yield the innermost functions with inline PTX that has effects, and their source."""
    for path in sorted((ROOT / package).rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text)
        functions = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)]
        for call in (x for x in ast.walk(tree) if isinstance(x, ast.Call)):
            given = {x.arg: getattr(x.value, "value", None) for x in call.keywords}
            if any(given.get(name) is value for name, value in EFFECTS.items()):
                around = [f for f in functions if f.lineno <= call.lineno <= f.end_lineno]
                inner = max(around, key=lambda f: f.lineno)
                where = f"{path.relative_to(ROOT)}: {inner.name}"
                yield where, inner.name, ast.get_source_segment(text, inner)


@pytest.mark.parametrize("package", PASSED)
def test_no_load_passes_ptx_with_effects(package):
    found = list(instructions(package))
    open_to_loads = {where: name for where, name, text in found if "~{memory}" not in text}
    unknown = {where for where, name in open_to_loads.items() if name not in PASSED[package]}
    assert unknown == set()
    assert set(open_to_loads.values()) == set(PASSED[package])
    assert len(found) > len(open_to_loads)
