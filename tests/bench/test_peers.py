"""Adapters of peers without a GPU: those that run here, stand-ins for those that do not."""

import sys
import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import pytest
import torch

from bench.job import Absent
from bench.peers import DECODE, FLASH, PREFILL, flashinfer, torch_peers
from bench.problems import attention_jobs, decode_tensors
from interop.parity.cases import DecodeCase, FlashCase, PagedCase
from interop.parity.check import sample_check
from interop.parity.inputs import make_inputs
from torch_attn import flash_attention
from twin_attention.contract.operands import FlashOperands
from twin_attention.contract.reference import attention_forward
from twin_attention.contract.spec import AttentionSpec, Window

SQUARE = FlashCase("square", batch=2, seq_q=32, seq_kv=32, heads_q=4, heads_kv=4, head_dim=16)
CASES = [
    SQUARE,
    replace(SQUARE, name="causal", causal=True, scale=0.4),
    replace(SQUARE, name="groups", causal=True, heads_kv=2),
    replace(SQUARE, name="rectangle", causal=True, seq_q=16),
    replace(SQUARE, name="float32", dtype="float32"),
]

# What each adapter takes of the cases above.
HALF = {"square", "causal", "groups"}
TAKES = {
    "eager": HALF | {"rectangle", "float32"},
    "FA2": HALF | {"rectangle"},
    "FA3": HALF | {"rectangle"},
    "FA4": HALF | {"rectangle"},
    "cuDNN": HALF,
    "FlexAttention": HALF | {"rectangle", "float32"},
    "jax.nn XLA": HALF | {"float32"},
    "jax.nn cuDNN": HALF,
    "jax Pallas mha": {"square", "causal"},
    "tokamax Mosaic": HALF,
    "tokamax Triton": HALF,
}
# What of them a CPU can run; the operations themselves are tested in test_calls.py.
OPERATION = dict.fromkeys(FLASH, "both") | {"FlexAttention": "forward"}
OPERATION |= dict.fromkeys(("cuDNN", "jax.nn cuDNN"), None)
OPERATION["FA3"] = "forward"
OPERATION["tokamax Triton"] = None  # as its Mosaic kernels


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """Peers that a CPU can run: not compiled, interpreted, or JAX's own attention for tokamax's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # at its first import
        import jax.experimental.pallas.ops.gpu.attention as jax_pallas

    def attend(*qkv, implementation, **options):
        assert implementation in ("mosaic", "triton")
        return jax.nn.dot_product_attention(*qkv, **options)

    def fa3(*qkv, softmax_scale, causal):
        return flash_attention(*qkv, scale=softmax_scale, causal=causal)

    def fa4(*qkv, softmax_scale, causal):
        return flash_attention(*qkv, scale=softmax_scale, causal=causal), None

    monkeypatch.setattr(torch_peers, "compiled", lambda function: function)
    for module, function in (("fa3_fwd_interface", fa3), ("flash_attn.cute", fa4)):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(flash_attn_func=function))
    monkeypatch.setattr(jax_pallas, "mha", partial(jax_pallas.mha, interpret=True))
    monkeypatch.setitem(sys.modules, "tokamax", SimpleNamespace(dot_product_attention=attend))


def tensors_of(case):
    inputs = make_inputs(case, "cpu")
    return [inputs[name] for name in ("q", "k", "v", "dout")]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("peer", FLASH)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_peer_is_right_where_it_is_not_absent(peer, case):
    tensors, operation = tensors_of(case), OPERATION[peer]
    if case.name not in TAKES[peer]:
        with pytest.raises(Absent):
            FLASH[peer](case, "both", tensors)
    elif operation is not None:
        call = FLASH[peer](case, operation, tensors)
        check = attention_jobs([case], [operation], lambda case: {})[0].check(tensors)
        assert check(call.result(call.run())) <= 1


@pytest.mark.parametrize("peer", FLASH)
@pytest.mark.parametrize("options", [{"window_size": (8, 0)}, {"softcap": 20.0}])
def test_a_peer_is_absent_where_its_adapter_would_drop_an_option(peer, options):
    case = replace(SQUARE, **options)
    with pytest.raises(Absent, match="neither windows nor capped scores"):
        FLASH[peer](case, "forward", tensors_of(case))


@pytest.mark.parametrize("options", [{"head_dim": 20}, {"head_dim_v": 264}])
def test_fa4_is_absent_at_a_head_size_that_it_does_not_take(options):
    case = replace(SQUARE, **options)
    with pytest.raises(Absent, match=r"takes head sizes up to 256 that 8 divides, not (20|264)"):
        FLASH["FA4"](case, "forward", tensors_of(case))


@pytest.mark.parametrize(
    ("module", "make"),
    [
        ("flash_attn.cute", lambda: FLASH["FA4"](SQUARE, "forward", tensors_of(SQUARE))),
        ("tokamax", lambda: FLASH["tokamax Mosaic"](SQUARE, "forward", tensors_of(SQUARE))),
        ("flashinfer", lambda: DECODE["FlashInfer"](PAGED, decode_tensors(PAGED, "cpu"))),
    ],
)
def test_a_peer_that_is_not_installed_is_absent(monkeypatch, module, make):
    monkeypatch.setitem(sys.modules, module, None)  # so that importing it fails
    with pytest.raises(Absent, match=f"{module} cannot be imported"):
        make()


def test_tokamax_is_absent_where_it_says_that_it_is_not_implemented(monkeypatch):
    def refuse(*_, **__):
        raise NotImplementedError("only on TPUs")

    module = SimpleNamespace(dot_product_attention=refuse)
    monkeypatch.setitem(sys.modules, "tokamax", module)
    with pytest.raises(Absent, match="only on TPUs"):
        FLASH["tokamax Mosaic"](SQUARE, "forward", tensors_of(SQUARE))


def test_tokamax_is_imported_without_xprof(monkeypatch, tmp_path):
    source = (
        "from jax.nn import dot_product_attention as attend\n"
        "from xprof.cli.tools import get_kernel_stats_tool\n"
        "def dot_product_attention(*qkv, implementation, **options):\n"
        "    return attend(*qkv, **options)\n"
    )
    (tmp_path / "tokamax.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tokamax")
    assert FLASH["tokamax Mosaic"](SQUARE, "forward", tensors_of(SQUARE))
    assert not any(name.startswith("xprof") for name in sys.modules)


def check_decode(case, tensors):
    return sample_check(tensors.arguments, case.spec, ("out",))


PAGED = DecodeCase(
    "paged", lengths=(5, 33, 16), tokens=1, heads_q=4, heads_kv=2, head_dim=16, page_size=8,
    max_pages=6,
)  # fmt: skip
DENSE = replace(PAGED, name="dense", lengths=(19, 19))


@pytest.mark.parametrize("tokens", [1, 3])
def test_fa2_decodes_from_a_dense_copy(tokens):
    case = replace(DENSE, tokens=tokens)
    tensors = decode_tensors(case, "cpu")
    call = DECODE["FA2 dense"](case, tensors)
    assert check_decode(case, tensors)(call.result(call.run())) <= 1


@pytest.mark.parametrize(
    ("peer", "options"),
    [
        ("FA2 dense", {"lengths": (5, 33)}),
        ("FA2 dense", {"window_size": (8, 0)}),
        ("FA2 dense", {"kv_dtype": "int8"}),
        ("cuDNN dense", {"tokens": 3}),
        ("FlashInfer", {"kv_dtype": "int8"}),
        ("FlashInfer", {"kv_dtype": "float8_e4m3fn", "scale_shape": (2,)}),
        ("FlashInfer", {"head_dim_v": 32}),
    ],
)
def test_a_decode_that_a_peer_does_not_do_is_absent(peer, options):
    case = replace(DENSE, **options)
    with pytest.raises(Absent):
        DECODE[peer](case, decode_tensors(case, "cpu"))


@pytest.mark.parametrize("backend", ["flash", "cudnn"])
@pytest.mark.parametrize("operation", ["forward", "both"])
def test_sdpas_operators_take_the_case(backend, operation):
    case = replace(SQUARE, causal=True)
    tensors = [torch.empty(case.shapes[0], dtype=torch.bfloat16, device="meta") for _ in range(4)]
    call = torch_peers.sdpa_operator(backend, case, operation, tensors)
    results = call.result(call.run())
    assert [x.shape for x in results] == [case.shapes[0]] * {"forward": 1, "both": 4}[operation]


@pytest.mark.parametrize("options", [{"heads_kv": 2}, {"seq_q": 16}, {"softcap": 5.0}])
def test_sdpa_without_a_choice_is_absent_where_it_would_drop_an_option(options):
    case = replace(SQUARE, causal=True, **options)
    for peer in (torch_peers.sdpa_by_default, partial(torch_peers.sdpa_operator, "flash")):
        with pytest.raises(Absent):
            peer(case, "forward", tensors_of(case))


DECODE_WRAPPER = "BatchDecodeWithPagedKVCacheWrapper"
PREFILL_WRAPPER = "BatchPrefillWithPagedKVCacheWrapper"


class Wrapper:
    """FlashInfer's wrappers as their documentation describes them, in plain torch."""

    planned = 0

    def __init__(self, workspace, layout):
        assert layout == "NHD"
        assert not workspace.any()

    def plan(self, *args, causal=False, sm_scale, window_left, logits_soft_cap, **dtypes):
        *rows, self.indptr, self.indices, self.last_page_len, hq, hkv, dim, page_size = args
        assert all(x.dtype == torch.int32 for x in args[: len(rows) + 3])
        assert bool(rows) == causal
        batch = len(self.last_page_len)
        self.rows = rows[0] if rows else torch.arange(batch + 1)
        tokens = int(self.rows[1])
        self.spec = AttentionSpec(
            1, tokens, 0, hq, hkv, dim, dim, "bfloat16", sm_scale,
            Window(None if window_left < 0 else window_left, 0), logits_soft_cap,
        )  # fmt: skip
        self.page_size, self.dtypes = page_size, dtypes
        Wrapper.planned += 1

    def run(self, q, cache, k_scale=1.0, v_scale=1.0):
        assert {"q_data_type": q.dtype, "kv_data_type": cache[0].dtype} == self.dtypes
        outs = []
        for b, last in enumerate(self.last_page_len):
            pages = self.indices[self.indptr[b] : self.indptr[b + 1]]
            length = (len(pages) - 1) * self.page_size + int(last)
            k, v = (x[pages].to(q.dtype).flatten(0, 1)[None, :length] for x in cache)
            begin, end = self.rows[b : b + 2].tolist()
            spec = replace(
                self.spec, seq_q=end - begin, seq_kv=length, scale=self.spec.scale * k_scale
            )
            rows = q[begin:end][None]
            outs.append(
                attention_forward(FlashOperands(rows, k, v), spec, torch.float32)[0][0] * v_scale
            )
        return torch.cat(outs).to(q.dtype)


@pytest.mark.parametrize(
    ("options", "wrapper"),
    [
        ({}, DECODE_WRAPPER),
        ({"tokens": None}, DECODE_WRAPPER),
        ({"tokens": 4}, PREFILL_WRAPPER),
        ({"kv_dtype": "float8_e4m3fn"}, DECODE_WRAPPER),
        ({"window_size": (9, 0), "softcap": 5.0, "scale": 0.3}, DECODE_WRAPPER),
    ],
)
def test_flashinfer_gets_the_pages_and_plans_once(monkeypatch, options, wrapper):
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(**{wrapper: Wrapper}))
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 64)
    monkeypatch.setattr(flashinfer, "_compile_ahead", lambda device: None)
    monkeypatch.setattr(Wrapper, "planned", 0)
    case = replace(PAGED, **options)
    tensors = decode_tensors(case, "cpu")
    call = DECODE["FlashInfer"](case, tensors)
    for _ in range(2):
        assert check_decode(case, tensors)(call.result(call.run())) <= 1
    assert Wrapper.planned == 1


CHUNKS = PagedCase(
    "chunks", lengths=(5, 33, 16), heads_q=4, heads_kv=2, head_dim=16, page_size=8, max_pages=6,
    new_tokens=(5, 1, 9),
)  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"new_tokens": (1, 1, 1)}, {"window_size": (9, 0)}])
def test_flashinfers_prefill_takes_any_number_of_new_tokens(monkeypatch, options):
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(**{PREFILL_WRAPPER: Wrapper}))
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 64)
    monkeypatch.setattr(Wrapper, "planned", 0)
    case = replace(CHUNKS, **options)
    tensors = decode_tensors(case, "cpu")
    call = PREFILL["FlashInfer"](case, tensors)
    for _ in range(2):
        assert check_decode(case, tensors)(call.result(call.run())) <= 1
    assert Wrapper.planned == 1


@pytest.mark.parametrize("options", [{"padding": 3}, {"sinks": True}, {"kv_dtype": "int8"}])
def test_flashinfers_prefill_is_absent_where_it_would_drop_something(options):
    with pytest.raises(Absent):
        PREFILL["FlashInfer"](replace(CHUNKS, **options), None)
