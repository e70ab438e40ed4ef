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
from bench.peers import DECODE, FLASH, PACKED, PREFILL, SPARSE, TREE, WIDE
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
from twin_attention.interop.parity.fuzz.problems import Problem
from twin_attention.interop.parity.fuzz.trial import run_problem
from twin_attention.interop.parity.subjects import (
    flashinfer,
    jax_fa3,
    jax_libraries,
    torch_libraries,
)
from twin_attention.interop.parity.subjects.absent import Absent
from twin_attention.interop.parity.subjects.libraries import LIBRARIES

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


def frontend(monkeypatch, too_old=None):
    """The cuDNN frontend's functions by our attention."""
    by_name = {
        "cudnn.frost.buffers": {"cutedsl_requirement_error": lambda name: too_old},
        "cudnn.sdpa.fwd.api_dsl": {"sdpa_fwd_wrapper_dsl_sm90": frontend_forward},
        "cudnn.flex_attention": {"create_mask_plan": plan, "flex_attn_func": frontend_flex},
    }
    for name, functions in by_name.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**functions))


def frontend_forward(q, k, v, is_causal, causal_bottom_right, window_size_left, scale_softmax):
    if not is_causal and (causal_bottom_right or window_size_left is not None):
        raise ValueError("requires is_causal=True")
    if causal_bottom_right and q.shape[2] > k.shape[2]:
        raise NotImplementedError("unpadded bottom-right S_q > S_kv")
    window = (window_size_left, 0 if causal_bottom_right or is_causal else None)
    qkv = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = flash_attention(*qkv, window_size=window, scale=scale_softmax, return_lse=True)
    return {"o_tensor": out.transpose(1, 2), "lse_tensor": lse}


def plan(ends, q, k, v):
    """Return which keys a query sees [B, 1, Sq, Skv], and whether a backward may follow."""
    if q.shape[-1] > 128:
        raise ValueError("supported head dimensions are Dqk and Dv independently in [8, 128]")
    (b, rows), keys = q.shape[:2], k.shape[1]
    assert ends.shape == (1, ends.shape[1], b * rows)
    assert (ends.dtype, ends.is_contiguous(), ends.shape[1] % 2) == (torch.int32, True, 1)
    assert 0 <= ends.min() <= ends.max() <= keys
    assert (ends.diff(dim=1) >= 0).all()
    turns = (ends[0, :, :, None] <= torch.arange(keys)).sum(0)
    seen = (turns % 2 == 0).view(b, 1, rows, keys)
    return seen, any(x.requires_grad for x in (q, k, v))


def frontend_flex(*qkv, mask_plan, softmax_scale, return_lse):
    seen, has_backward = mask_plan
    assert has_backward or not any(x.requires_grad for x in qkv)
    bias = torch.zeros((), dtype=qkv[0].dtype).where(seen, -torch.inf)
    return flash_attention(*qkv, bias=bias, scale=softmax_scale, return_lse=return_lse)


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
    frontend(monkeypatch)


def flash(peer, operation="forward", table=FLASH, **options):
    case = replace(SQUARE, **options)
    return table[peer](case, operation, attention_tensors(case, "cpu"))


wide, masked = (partial(flash, table=x) for x in (WIDE, TREE))


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
    (TREE, replace(SQUARE, name="several", seq_q=16, scale=0.4, window_size=(5, 2))),
    (TREE, SQUARE),
]


@pytest.mark.parametrize(
    ("makers", "peer", "case"),
    [
        (makers, peer, case)
        for makers, case in MASKED
        for peer in makers
        if "cuDNN padded" not in peer
    ],
    ids=lambda x: getattr(x, "name", x if isinstance(x, str) else ""),
)
def test_a_peer_of_masks_and_packed_sequences_is_right(makers, peer, case):
    tensors = attention_tensors(case, "cpu")
    # FlexAttention has no backward on a CPU, and FA3's package none at all.
    has_backward = makers is PACKED and peer not in ("FlexAttention", "FA3 varlen")
    has_backward = has_backward or peer.startswith("cuDNN frontend")
    operation = "backward" if has_backward else "forward"
    call = makers[peer](case, operation, tensors)
    assert attention_check(case, operation, tensors)(call.result(call.run())) <= 1


@pytest.mark.parametrize("options", [
    {}, {"causal": True, "heads_kv": 2, "scale": -0.4}, {"causal": True, "window_size": (5, None)},
    {"causal": True, "seq_q": 16, "head_dim_v": 24}, {"window_size": (5, 0)}, {"seq_kv": 16},
])  # fmt: skip
def test_the_cudnn_frontend_is_right_and_forward_only(options):
    case = replace(SQUARE, head_dim=320, **options)
    tensors = attention_tensors(case, "cpu")
    call = WIDE["cuDNN frontend"](case, "forward", tensors)
    assert attention_check(case, "forward", tensors)(call.result(call.run())) <= 1
    with pytest.raises(Absent, match="forward only"):
        WIDE["cuDNN frontend"](case, "backward", tensors)


@pytest.mark.parametrize(("peer", "plans"), [("flex", 1), ("flex, plan made", 4)])
def test_the_cudnn_frontend_plans_once_or_at_every_call(monkeypatch, peer, plans):
    made = []
    monkeypatch.setattr(
        sys.modules["cudnn.flex_attention"], "create_mask_plan",
        lambda *problem: made.append(problem) or plan(*problem),
    )  # fmt: skip
    call = masked(f"cuDNN frontend {peer}", "both", causal=True)
    for _ in range(3):
        call.run()
    assert len(made) == plans


@pytest.mark.parametrize(("name", "more"), [
    ("cuDNN frontend", set()), ("cuDNN frontend flex", {"dq", "dk", "dv"}),
])  # fmt: skip
def test_the_cudnn_frontends_log_sum_exp_and_gradients_are_checked(name, more):
    result = run_problem(Problem(replace(SQUARE, causal=True)), [[LIBRARIES[name]]], "cpu")
    assert {c.output for c in result.comparisons} == {"out", "lse"} | more
    assert result.ok


@pytest.mark.parametrize(("make", "peer"), [(wide, ""), (masked, " flex")])
def test_a_cudnn_frontend_with_too_old_a_compiler_is_absent(monkeypatch, make, peer):
    frontend(monkeypatch, too_old="requires nvidia-cutlass-dsl >= 4.7.0")
    with pytest.raises(Absent, match="cutlass-dsl >= 4"):
        make(f"cuDNN frontend{peer}", head_dim=16)


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
    (flash, "FA4", {"head_dim_v": 264}), (packed, "FA4 varlen", {"lengths": ((3, 4),)}),
    (flash, "jax FA3", {"head_dim_v": 32}), (packed, "jax FA3 varlen", {"head_dim_v": 32}),
    (packed, "FA2 padded", {"causal": False}), (wide, "ffpa-attn", {"head_dim": 256}),
    *((decode, "FA2 dense", x) for x in (
        {"lengths": (5, 33)}, {"window_size": (8, 0)}, {"kv_dtype": "int8"}, {"tree": "drafts"},
    )),
    (decode, "cuDNN dense", {"tokens": 3}),
    *((decode, "FlashInfer", x) for x in (
        {"tree": "drafts"}, {"kv_dtype": "int8"}, {"head_dim_v": 32},
        {"kv_dtype": "float8_e4m3fn", "scale_shape": (2,)},
    )),
    *((wide, "cuDNN frontend", x) for x in (
        {"window_size": (8, None)}, {"window_size": (8, 2)}, {"softcap": 5.0}, {"sinks": True},
        {"dtype": "float32"}, {"causal": True, "seq_q": 64},
    )),
    *((masked, "cuDNN frontend flex", x) for x in (
        {"softcap": 5.0}, {"scale": -0.4}, {"causal": True, "seq_q": 64}, {"head_dim": 160},
    )),
]  # fmt: skip


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
        ("cudnn.frost.buffers", partial(wide, "cuDNN frontend")),
        ("cudnn.sdpa.fwd.api_dsl", partial(wide, "cuDNN frontend")),
        ("cudnn.flex_attention", partial(masked, "cuDNN frontend flex")),
        ("ffpa_attn.cute", partial(wide, "ffpa-attn", head_dim=320)),
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
