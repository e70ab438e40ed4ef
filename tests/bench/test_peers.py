"""Adapters of peers: those that run without a GPU, stand-ins for the others."""

import sys
import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import pytest
import torch

from bench import peers
from bench.peers import DECODE, FLASH, PACKED, PREFILL, SPARSE, TREE
from bench.problems import SparseCase, attention_check, attention_tensors, decode_tensors
from bench.suites.ranges import range_case
from bench.suites.tree import tree_case
from pallas_attn import flash_attention as jax_flash_attention
from pallas_attn import flash_attention_varlen as jax_flash_attention_varlen
from torch_attn import flash_attention, flash_attention_varlen
from twin_attention.contract.operands import FlashOperands
from twin_attention.contract.reference.attention import attention_forward
from twin_attention.contract.spec import AttentionSpec, Window
from twin_attention.interop.parity.cases import DecodeCase, FlashCase, PagedCase, VarlenCase
from twin_attention.interop.parity.check import sample_check
from twin_attention.interop.parity.subjects import (
    flashinfer,
    jax_fa3,
    jax_libraries,
    torch_libraries,
)
from twin_attention.interop.parity.subjects.absent import Absent

SQUARE = FlashCase("square", batch=2, seq_q=32, seq_kv=32, heads_q=4, heads_kv=4, head_dim=16)
CASES = [
    SQUARE,
    replace(SQUARE, name="causal", causal=True, scale=0.4),
    replace(SQUARE, name="groups", causal=True, heads_kv=2),
    replace(SQUARE, name="rectangle", causal=True, seq_q=16),
    replace(SQUARE, name="float32", dtype="float32"),
]
LENGTHS = (5, 12, 1, 9)
DOCUMENTS = VarlenCase(
    "packed", tuple((n, n) for n in LENGTHS), (0, 0), heads_q=2, heads_kv=1, head_dim=16
)
BLOCKS = SparseCase("blocks", 2, 300, 300, head_dim=16, kept=0.4)
PAGED = DecodeCase(
    "paged", lengths=(5, 33, 16), tokens=1, heads_q=4, heads_kv=2, head_dim=16, page_size=8,
    max_pages=6,
)  # fmt: skip
DENSE = replace(PAGED, name="dense", lengths=(19, 19))
CHUNKS = PagedCase(
    "chunks", lengths=(5, 33, 16), heads_q=4, heads_kv=2, head_dim=16, page_size=8, max_pages=6,
    new_tokens=(5, 1, 9),
)  # fmt: skip
HALF = {"square", "causal", "groups"}
TAKES = dict.fromkeys(FLASH, HALF) | dict.fromkeys(
    ("FA2", "FA3", "FA4", "jax FA3"), HALF | {"rectangle"}
)
TAKES |= dict.fromkeys(("eager", "FlexAttention"), HALF | {"rectangle", "float32"})
TAKES |= {"jax.nn XLA": HALF | {"rectangle", "float32"}, "jax Pallas mha": {"square", "causal"}}
OPERATION = dict.fromkeys(FLASH, "both") | dict.fromkeys(("FlexAttention", "FA3"), "forward")
OPERATION |= dict.fromkeys(("cuDNN", "jax.nn cuDNN", "tokamax Triton"), None)

KERNELS = jax.ffi.ffi_call


def fa3_call(name, results):
    """The library's calls by our attention in JAX."""
    *_, rows, scratch = results
    packed, backward = "varlen" in name, name.endswith("bwd")
    assert name in jax_fa3.TARGETS

    def call(*operands, softmax_scale, is_causal, **sizes):
        dout, *operands = operands if backward else (None, *operands)
        (q, k, v), saved, offsets = operands[:3], operands[3:][: 2 * backward], ()
        if packed:
            offsets = operands[-2:]
            assert (sizes.pop("max_seqlen"), sizes.pop("max_seqlen_k")) == (max(LENGTHS),) * 2
        assert sizes == {"window_size_left": -1, "window_size_right": -1}
        options = {"causal": is_causal, "scale": float(softmax_scale)}
        function = jax_flash_attention_varlen if packed else jax_flash_attention
        attend = partial(function, return_lse=True, **options)
        (out, lse), pull = jax.vjp(lambda *qkv: attend(*qkv, *offsets), q, k, v)
        found = (out, lse, jax.numpy.zeros((1,) * 4), jax.numpy.zeros((1,) * 3))
        if backward:
            assert [x.shape for x in saved] == [out.shape, lse.shape]
            least = -(-q.shape[-3] // 128) * 128 * (1 if packed else len(q)) * q.shape[-2]
            assert scratch.shape == rows.shape >= (least,)
            found = (*pull((dout, jax.numpy.zeros_like(lse))), *(2 * [jax.numpy.zeros(rows.shape)]))
        assert [(x.shape, x.dtype) for x in results] == [(x.shape, x.dtype) for x in found]
        return found

    return call


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """Not compiled, interpreted, or our own and JAX's attention."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # at its first import
        import jax.experimental.pallas.ops.gpu.attention as jax_pallas

    def tokamax(*qkv, implementation, **options):
        assert implementation in ("mosaic", "triton")
        return jax.nn.dot_product_attention(*qkv, **options)

    def fa3(*qkv, softmax_scale, causal):
        return flash_attention(*qkv, scale=softmax_scale, causal=causal)

    def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
               causal):  # fmt: skip
        assert max_seqlen_q == max_seqlen_k == max(LENGTHS)
        offsets = cu_seqlens_q, cu_seqlens_k
        return flash_attention_varlen(q, k, v, *offsets, causal=causal, scale=softmax_scale)

    def aten(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale):
        assert (dropout, debug) == (0.0, False)
        return (varlen(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal),)

    # FA4 returns the log-sum-exp as well, and has qv before the offsets.
    fa4 = SimpleNamespace(
        flash_attn_func=lambda *qkv, **options: (fa3(*qkv, **options), None),
        flash_attn_varlen_func=lambda q, k, v, qv=None, **ends: (varlen(q, k, v, **ends), None),
    )
    fa3_module = SimpleNamespace(flash_attn_func=fa3, flash_attn_varlen_func=varlen)
    operators = SimpleNamespace(_flash_attention_forward=aten)
    monkeypatch.setattr(torch_libraries, "aten", lambda: operators)
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", fa3_module)
    monkeypatch.setattr(jax_fa3, "register", lambda: None)
    monkeypatch.setattr(jax.ffi, "ffi_call", fa3_call)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", fa4)
    monkeypatch.setattr(jax_pallas, "mha", partial(jax_pallas.mha, interpret=True))
    monkeypatch.setitem(sys.modules, "tokamax", SimpleNamespace(dot_product_attention=tokamax))


def flash(peer, operation="forward", **options):
    case = replace(SQUARE, **options)
    return FLASH[peer](case, operation, attention_tensors(case, "cpu"))


def packed(peer, operation="forward", **options):
    case = replace(DOCUMENTS, **options)
    return PACKED[peer](case, operation, attention_tensors(case, "cpu"))


def decode(peer, **options):
    case = replace(DENSE, **options)
    return DECODE[peer](case, decode_tensors(case, "cpu"))


@pytest.mark.parametrize("peer", FLASH)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_peer_is_right_where_it_is_not_absent(peer, case):
    tensors, operation = attention_tensors(case, "cpu"), OPERATION[peer]
    if case.name not in TAKES[peer]:
        with pytest.raises(Absent):
            FLASH[peer](case, "both", tensors)
    elif operation is not None:
        call = FLASH[peer](case, operation, tensors)
        assert attention_check(case, operation, tensors)(call.result(call.run())) <= 1


MASKED = [
    (PACKED, DOCUMENTS),
    (SPARSE, BLOCKS),
    (SPARSE, replace(BLOCKS, name="local", pattern="local", causal=True)),
    (TREE, tree_case("tree", (-1, 0, 0, 2, -1), (200, 33, 50, 7, 9), 16, heads_q=2, heads_kv=2)),
    (TREE, range_case("spans", "spans", 30, 200, 2, 16)),
    (TREE, range_case("diffusion", "diffusion", 30, 200, 2, 16)),
]


@pytest.mark.parametrize(
    ("makers", "peer", "case"),
    [(makers, peer, case) for makers, case in MASKED for peer in makers if "cuDNN" not in peer],
    ids=lambda x: getattr(x, "name", x if isinstance(x, str) else ""),
)
def test_a_peer_of_masks_and_packed_sequences_is_right(makers, peer, case):
    tensors = attention_tensors(case, "cpu")
    # FlexAttention has no backward on a CPU, and FA3's package none at all.
    has_backward = makers is PACKED and peer not in ("FlexAttention", "FA3 varlen")
    operation = "backward" if has_backward else "forward"
    call = makers[peer](case, operation, tensors)
    assert attention_check(case, operation, tensors)(call.result(call.run())) <= 1


REFUSED = [
    (flash, peer, x)
    for peer in FLASH
    for x in ({"window_size": (8, 0)}, {"softcap": 2.0})
    if peer not in ("eager", "FlexAttention")
    and (peer, x) != ("jax.nn XLA", {"window_size": (8, 0)})
]
REFUSED += [(packed, peer, x) for peer in PACKED for x in (
    {"softcap": 5.0}, {"padding": (0, 3)}, {"sinks": True},
)]  # fmt: skip
REFUSED += [
    (flash, "FA4", {"head_dim_v": 264}),
    (flash, "jax FA3", {"head_dim_v": 32}),
    (packed, "FA4 varlen", {"lengths": ((3, 4),)}),
    (packed, "jax FA3 varlen", {"head_dim_v": 32}),
    (packed, "FA2 padded", {"causal": False}),
    (decode, "FA2 dense", {"lengths": (5, 33)}),
    (decode, "FA2 dense", {"window_size": (8, 0)}),
    (decode, "FA2 dense", {"kv_dtype": "int8"}),
    (decode, "cuDNN dense", {"tokens": 3}),
    (decode, "FA2 dense", {"tree": "drafts"}),
    (decode, "FlashInfer", {"tree": "drafts"}),
    (decode, "FlashInfer", {"kv_dtype": "int8"}),
    (decode, "FlashInfer", {"kv_dtype": "float8_e4m3fn", "scale_shape": (2,)}),
    (decode, "FlashInfer", {"head_dim_v": 32}),
]


@pytest.mark.parametrize(("make", "peer", "options"), REFUSED)
def test_a_peer_is_absent_where_its_adapter_would_drop_something(make, peer, options):
    with pytest.raises(Absent):
        make(peer, **options)


@pytest.mark.parametrize("options", [{"padding": 3}, {"sinks": True}, {"kv_dtype": "int8"}])
def test_flashinfers_prefill_is_absent_where_it_would_drop_something(options):
    with pytest.raises(Absent):
        PREFILL["FlashInfer"](replace(CHUNKS, **options), None)


@pytest.mark.parametrize(
    ("module", "make"),
    [
        ("flash_attn.cute", partial(flash, "FA4")),
        ("tokamax", partial(flash, "tokamax Mosaic")),
        ("flashinfer", partial(decode, "FlashInfer")),
    ],
)
def test_a_peer_that_is_not_installed_is_absent(monkeypatch, module, make):
    monkeypatch.setitem(sys.modules, module, None)  # so that importing it fails
    with pytest.raises(Absent, match=f"{module} cannot be imported"):
        make()


def test_a_peer_that_needs_too_much_or_has_no_such_function_is_absent(monkeypatch):
    monkeypatch.setattr(jax_libraries, "SCORES_MAX", 4 * 2 * 27**2 - 1)
    with pytest.raises(Absent, match="its scores would take"):
        packed("jax.nn XLA")
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", SimpleNamespace())
    with pytest.raises(Absent, match="has no flash_attn_varlen_func"):
        packed("FA3 varlen")

    def refuse(*_, **__):
        raise NotImplementedError("only on TPUs")

    monkeypatch.setitem(sys.modules, "tokamax", SimpleNamespace(dot_product_attention=refuse))
    with pytest.raises(Absent, match="only on TPUs"):
        flash("tokamax Mosaic")


@pytest.mark.parametrize(("make", "peer", "kind", "lengths"), [
    (flash, "jax FA3", "mha", ""),
    (packed, "jax FA3 varlen", "mha_varlen", "max_seqlen = 12 : i64, max_seqlen_k = 12 : i64, "),
])  # fmt: skip
def test_xla_is_to_call_fa3_with_the_librarys_types(monkeypatch, make, peer, kind, lengths):
    monkeypatch.setattr(jax.ffi, "ffi_call", KERNELS)
    calls = []

    def keep(*call):
        calls.append(call)
        return SimpleNamespace(run=lambda: None)

    monkeypatch.setattr(peers, "jax_call", keep)
    make(peer, causal=True, scale=0.5)
    ((attend, _, tensors),) = calls
    q, k, v, dout = (jax.ShapeDtypeStruct(x.shape, "bfloat16") for x in tensors)
    both = jax.jit(lambda dout, *qkv: jax.vjp(attend, *qkv)[1](dout))
    text = both.trace(dout, q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    attributes = (
        f"{{is_causal = true, {lengths}softmax_scale = 5.000000e-01 : f64, "
        "window_size_left = -1 : i64, window_size_right = -1 : i64}"
    )
    for name in ("fwd", "bwd"):
        (line,) = (x for x in text.splitlines() if f"@dew_flash3_{kind}_{name}(" in x)
        assert attributes in line


@pytest.mark.parametrize("backend", ["flash", "cudnn"])
@pytest.mark.parametrize("operation", ["forward", "both"])
def test_sdpas_operators_take_the_case(backend, operation):
    case = replace(SQUARE, causal=True)
    tensors = [torch.empty(case.shapes[0], dtype=torch.bfloat16, device="meta") for _ in range(4)]
    call = peers.sdpa_operator(backend, case, operation, tensors)
    results = call.result(call.run())
    assert [x.shape for x in results] == [case.shapes[0]] * {"forward": 1, "both": 4}[operation]


@pytest.mark.parametrize("options", [{"seq_q": 16}, {"softcap": 5.0}])
def test_sdpas_operator_is_absent_where_it_would_drop_an_option(options):
    case = replace(SQUARE, causal=True, **options)
    with pytest.raises(Absent):
        peers.sdpa_operator("flash", case, "forward", attention_tensors(case, "cpu"))


def check_decode(case, tensors, call):
    return sample_check(tensors.arguments, case.spec, ("out",))(call.result(call.run()))


@pytest.mark.parametrize("tokens", [1, 3])
def test_fa2_decodes_from_a_dense_copy(tokens):
    case = replace(DENSE, tokens=tokens)
    tensors = decode_tensors(case, "cpu")
    assert check_decode(case, tensors, DECODE["FA2 dense"](case, tensors)) <= 1


class Wrapper:
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
    ("case", "options", "wrapper"),
    [
        (PAGED, {}, "Decode"),
        (PAGED, {"tokens": None}, "Decode"),
        (PAGED, {"tokens": 4}, "Prefill"),
        (PAGED, {"kv_dtype": "float8_e4m3fn"}, "Decode"),
        (PAGED, {"window_size": (9, 0), "softcap": 5.0, "scale": 0.3}, "Decode"),
        (CHUNKS, {}, "Prefill"),
        (CHUNKS, {"new_tokens": (1, 1, 1)}, "Prefill"),
        (CHUNKS, {"window_size": (9, 0)}, "Prefill"),
    ],
)
def test_flashinfer_gets_the_pages_and_plans_once(monkeypatch, case, options, wrapper):
    module = SimpleNamespace(**{f"Batch{wrapper}WithPagedKVCacheWrapper": Wrapper})
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 64)
    monkeypatch.setattr(flashinfer, "_compile_ahead", lambda device: None)
    monkeypatch.setattr(Wrapper, "planned", 0)
    case = replace(case, **options)
    tensors = decode_tensors(case, "cpu")
    adapters = PREFILL if isinstance(case, PagedCase) else DECODE
    call = adapters["FlashInfer"](case, tensors)
    for _ in range(2):
        assert check_decode(case, tensors, call) <= 1
    assert Wrapper.planned == 1
