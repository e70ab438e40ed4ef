import os
import subprocess
import sys
from pathlib import Path

import pytest

TEST = """
import sys

import torch

assert not {"torch_attn", "jax", "triton"} & {*sys.modules}


def attention(q, k, v, *, causal=False, scale=None):
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    p = s.softmax(-1).to(v.dtype)
    return torch.einsum("bhij,bjhd->bihd", p, v)


def test_attention(check_attention):
    check_attention(attention, {CLAIMS}, suite=None, seconds=1, longest=9, shrink_seconds=0)
"""
COMMAND = (sys.executable, "-m", "pytest", "-q")
CLAIMED = '"flash_attention", "float32", "scale", "D not 64, 128 or 256"'
CAUSAL = '{"kind": "FlashCase", "case": {"name": "x", "dtype": "float32", "causal": true}}'


@pytest.mark.parametrize(
    ("claims", "arguments", "said"),
    [
        (CLAIMED, (), "1 passed"),
        (f'{CLAIMED}, "causal"', ("--attention-problem", CAUSAL), '"name": "x"'),
    ],
)
def test_the_fixture_takes_the_commands_options(tmp_path, claims, arguments, said):
    (tmp_path / "test_own.py").write_text(TEST.replace("CLAIMS", claims))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command, where = [*COMMAND, *arguments], {"cwd": tmp_path, "env": environment}
    assert said in subprocess.run(command, **where, capture_output=True, text=True).stdout
