import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pallas_attn
import torch_attn
from tests.test_docs import ROOT, examples

USES = """
from typing import assert_type

import {framework}
import {side}
from {framework} import {array}
from {side} import BlockMask, append_kv, flash_attention, paged_decode


def use(x: {array}, flag: bool) -> None:
    assert_type(flash_attention(x, x, x), {array})
    assert_type(flash_attention(x, x, x, causal=True, return_lse=False), {array})
    assert_type(flash_attention(x, x, x, return_lse=True), tuple[{array}, {array}])
    assert_type(flash_attention(x, x, x, return_lse=flag), {array} | tuple[{array}, {array}])
    assert_type(flash_attention(x, x, x, return_row_max=True), tuple[{array}, {array}])
    both = flash_attention(x, x, x, return_lse=True, return_row_max=True)
    assert_type(both, tuple[{array}, {array}, {array}])
    assert_type(paged_decode(x, x, x, x, x, implementation="triton"), {array})
    assert_type(paged_decode(x, x, x, x, x, return_lse=True), tuple[{array}, {array}])
    assert_type(paged_decode(x, x, x, x, x, return_lse=flag), {array} | tuple[{array}, {array}])
    assert_type(BlockMask.of(x), BlockMask[{array}])
    assert_type(append_kv(x, x, x, x, x, x), tuple[{array}, {array}])
    rotated = append_kv(x, x, x, x, x, x, q=x, rotary_cos=x, rotary_sin=x)
    assert_type(rotated, tuple[{array}, {array}, {array}])
"""
MISUSES = (
    'flash_attention(x, x, x, implementation="cudnn")',
    "flash_attention(x, x, x, is_causal=True)",
    "append_kv(x, x, x, x, x, x, q=x)",
)
# A section that names a module goes before one with a pattern.
MYPY = """
[mypy]
follow_imports = silent
[mypy-torch.*,jax.*,numpy.*,triton.*,transformers.*]
follow_imports = skip
[mypy-torch,torch._tensor,jax,jax._src.basearray]
follow_imports = silent
"""


def installed(tool):
    return pytest.mark.skipif(
        importlib.util.find_spec(tool) is None, reason=f"{tool} is not installed"
    )


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    for i, program in enumerate(examples(ROOT / "README.md")):
        (folder / f"readme_{i}.py").write_text(program)
    for side, framework, array in (
        ("torch_attn", "torch", "Tensor"), ("pallas_attn", "jax", "Array"),
    ):  # fmt: skip
        uses = USES.format(side=side, framework=framework, array=array)
        (folder / f"{side}_right.py").write_text(uses)
        for i, misuse in enumerate(MISUSES):
            (folder / f"{side}_wrong_{i}.py").write_text(f"{uses}    {misuse}\n")
    return folder


def errors_of(command, folder, **options):
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, **options)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    return [line.strip() for line in result.stdout.splitlines() if "error:" in line]


def assert_right_but_for_the_misuse(errors):
    assert [e for e in errors if "_wrong_" not in e] == []
    for side in ("torch_attn", "pallas_attn"):
        for i in range(len(MISUSES)):
            assert any(f"{side}_wrong_{i}.py" in e for e in errors), errors


@installed("pyright")
def test_pyright(programs):
    (programs / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    assert_right_but_for_the_misuse(errors_of(command, programs))


@installed("mypy")
def test_mypy(programs):
    """Read only the frameworks' array types: their other modules take most of a minute."""
    (programs / "mypy.ini").write_text(MYPY)
    files = sorted(path.name for path in Path(programs).glob("*.py"))
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    command = [sys.executable, "-m", "mypy", *files]
    assert_right_but_for_the_misuse(errors_of(command, programs, env=environment))


@pytest.mark.parametrize("side", [torch_attn, pallas_attn])
def test_type_checkers_know_every_keyword(side):
    for function, known in (
        (side.flash_attention, side.keywords.FlashKeywords),
        (side.flash_attention_varlen, side.keywords.VarlenKeywords),
        (side.paged_decode, side.keywords.DecodeKeywords),
        (side.paged_attention, side.keywords.PagedKeywords),
    ):
        parameters = inspect.signature(function).parameters.values()
        keywords = {x.name for x in parameters if x.kind is x.KEYWORD_ONLY}
        assert keywords - {"return_lse", "return_row_max"} == {*known.__annotations__}


@pytest.mark.parametrize("package", ["twin_attention", "torch_attn", "pallas_attn"])
def test_a_package_says_that_it_has_types(package):
    assert (ROOT / package / "py.typed").exists()
