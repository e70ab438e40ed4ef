import jax
import pytest

import pallas_attn.warm
import torch_attn.warm
from twin_attention.targets import warm

SIDES = pytest.mark.parametrize("side", [torch_attn, pallas_attn])
DENSE = "flash_attention q=1x9x4x32:float32 k=1x9x2x32:float32 v=1x9x2x32:float32"
CALLS = [
    f"{DENSE} causal=True window_size=(7, None) alibi_slopes=4:float32",
    f"{DENSE} sinks=4:float32 return_lse=True",
    "paged_decode q=2x4x32:float16 k_pages=8x16x2x32:float16 v_pages=8x16x2x32:float16 "
    "block_tables=2x4:int32 seq_lens=2:int32",
]


@SIDES
def test_calls_and_their_gradients_are_compiled(side, tmp_path, capsys, monkeypatch):
    compiled = []
    flash = side.flash_attention

    def spy(**arguments):
        compiled.append(sorted(arguments))
        if side is torch_attn:
            asked = {name for name, x in arguments.items() if getattr(x, "requires_grad", False)}
            assert asked >= {"q", "k", "v"}
        else:
            assert isinstance(arguments["q"], jax.core.Tracer)
        return flash(**arguments)

    monkeypatch.setattr(side, "flash_attention", spy)
    (file := tmp_path / "calls.txt").write_text("\n".join(["# calls", "", *CALLS]))
    assert warm.main(side.__name__, side.warm.compile_call, [str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.endswith(f" s  {call}") for line, call in zip(lines, CALLS, strict=True))
    assert compiled[0] == sorted(["q", "k", "v", "causal", "window_size", "alibi_slopes"])


@SIDES
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("attention q=1", "function: expected one of flash_attention, "),
        (f"{DENSE} causal", "flash_attention: expected arguments such as "),
        (f"{DENSE} causal=yes", "causal: expected a shape and a dtype, such as "),
        ("flash_attention q=1x9:real", "q: expected a"),
        (f"{DENSE} window_size=(1,)", "window_size: expected "),
    ],
)
def test_a_line_that_fails_says_why(side, line, message, tmp_path, capsys):
    (file := tmp_path / "calls.txt").write_text(line)
    assert warm.main(side.__name__, side.warm.compile_call, [str(file)]) == 1
    assert capsys.readouterr().err.startswith(f"{line}\n  {message}")
