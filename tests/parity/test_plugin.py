"""The plugin of pytest: its fixture, its options, and that it imports no framework."""

import os
import subprocess
import sys
from pathlib import Path

TEST = """
import sys

import torch

assert not {"torch_attn", "jax", "triton"} & {*sys.modules}


def attention(q, k, v, *, causal=False, scale=None):
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    p = s.softmax(-1).to(v.dtype)
    return torch.einsum("bhij,bjhd->bihd", p, v)


def test_attention(check_attention):
    check_attention(attention, {CLAIMS}, suite=None, seconds=0.1, longest=9, shrink_seconds=0)
"""
COMMAND = (sys.executable, "-m", "pytest", "-q", "-p", "twin_attention.pytest_plugin")


def run(folder: Path, claims: str, *arguments: str) -> tuple[int, str]:
    (folder / "test_own.py").write_text(TEST.replace("CLAIMS", claims))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    found = subprocess.run([*COMMAND, *arguments], cwd=folder, env=environment,
                           capture_output=True, text=True)  # fmt: skip
    return found.returncode, found.stdout


def test_the_fixture_finds_a_fault_and_its_option_repeats_it(tmp_path):
    claims = '"flash_attention", "float32", "scale", "D not 64, 128 or 256"'
    assert run(tmp_path, claims)[0] == 0
    line = '{"kind": "FlashCase", "case": {"name": "x", "dtype": "float32", "causal": true}}'
    code, printed = run(tmp_path, f'{claims}, "causal"', "--attention-problem", line)
    assert code == 1
    assert "AssertionError: the function, first: out" in printed
