"""Kernels of `torch_attn` inside `jax.jit`, interpreted: bit for bit what `torch_attn` gives.

A callback in place of jaxlib runs each launch in the interpreters of Triton and Gluon, on the
program's buffers. Results hold NaN before, or 0.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import pallas_attn
from pallas_attn import explain
from pallas_attn.distributed import context_attention
from pallas_attn.flash_ops import DENSE, PACKED
from tests.oracle import assert_within_budget
from tests.torch_attn.gluon_interpreter import WRITES_FIRST, interpret_launch, interpreted
from torch_attn.layouts import leaves
from torch_attn.targets import described
from tuning.static import gate
from tuning.static.operands import flash_operands
from twin_attention.contract.operands import (
    DIFFERENTIABLE,
    FlashOperands,
    PartialOperands,
    VarlenOperands,
)
from twin_attention.contract.spec import AttentionSpec
from twin_attention.interop.kernels import cubin, run_in_jax, triton_call
from twin_attention.interop.kernels.machine import (
    Compiled,
    Descriptor,
    Number,
    Pointer,
    arrange_buffers,
)
from twin_attention.interop.parity.cases import ContextCase, DecodeCase
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.sides import Ours
from twin_attention.interop.parity.suites.kinds import KINDS
from twin_attention.targets import config, ptx
from twin_attention.targets.conditions import CONDITIONS
from twin_attention.targets.describe import describe
from twin_attention.targets.family import FAMILIES, FOREIGN, Backend, choose
from twin_attention.targets.target import NUM_SMS, use_target

GLUON, GLUON_SM90, TORCH_TRITON = FOREIGN["pallas_attn"]
OWN = {family.folder: family for family in FAMILIES["torch_attn"]}  # as torch_attn has them
SPEC = AttentionSpec(1, 9, 9, 1, 1, 64, 64, "float16", 1)
REASON = GLUON.supports("flash_fwd", SPEC, "sm80")
if REASON is not None and "private names" not in REASON:  # jaxlib launches nothing here
    pytest.skip(REASON, allow_module_level=True)


LAUNCHED = []  # one list, since what one test has traced another one may run


def call(inputs, kernel):
    (question, *_, launch), _, read, written, zeroed = kernel
    layouts = [x for x in leaves(launch.layouts) if x is not None]
    results = triton_call.result_types(inputs, kernel)

    def run(*arrays):
        tensors = dict(zip(read, map(to_torch, arrays), strict=True))
        for i in {*written} - {*read}:
            dtype = layouts[i].dtype
            poison = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
            tensors[i] = torch.full(layouts[i].shape, 0 if i in zeroed else poison, dtype=dtype)
        # An operand that no argument has is not passed at all. A kernel may see another's bits.
        every = tuple(
            tensors[i].view(layouts[i].dtype) if i in tensors else None for i in range(len(layouts))
        )
        LAUNCHED.append(launch.name)
        with described(question.card):
            interpret_launch(launch, every, WRITES_FIRST)
        return [to_numpy(tensors[i]) for i in written]

    return jax.pure_callback(run, results, *inputs)


@pytest.fixture(scope="module", autouse=True)
def _interpreted():
    """Interpret what jaxlib would launch, with no traced code from other files."""
    jax.clear_caches()
    launched = tuple(replace(x, has_interpreter=False) for x in FOREIGN["pallas_attn"])
    with pytest.MonkeyPatch.context() as patch, interpreted(WRITES_FIRST):
        patch.setitem(FOREIGN, "pallas_attn", launched)
        patch.setattr(run_in_jax, "kernel_call", call)
        patch.setattr("pallas_attn.private.missing", lambda group: None)
        yield
    jax.clear_caches()


@pytest.fixture
def launches():
    LAUNCHED.clear()
    return LAUNCHED


def to_torch(x):
    x = np.array(x)
    if x.dtype == jnp.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    if x.dtype == jnp.float8_e4m3fn:
        return torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(x)


def to_numpy(x):
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(jnp.bfloat16)
    if x.dtype == torch.float8_e4m3fn:
        return x.view(torch.uint8).numpy().view(jnp.float8_e4m3fn)
    return x.numpy()


def problem(key, shapes, dtype):
    keys = jax.random.split(jax.random.key(key), len(shapes))
    return [jax.random.normal(k, shape, dtype) for k, shape in zip(keys, shapes, strict=True)]


def check(family, target, operands, dout, launches, **options):
    packed = isinstance(operands, VarlenOperands)
    function = pallas_attn.flash_attention_varlen if packed else pallas_attn.flash_attention
    problem = (PACKED if packed else DENSE).problem
    defaults = {
        "causal": False, "scale": None, "window_size": None, "softcap": None, "precision": "ieee",
        "return_row_max": False, "dropout_rate": 0.0, "batch_invariant": False,
    }  # fmt: skip
    options = {**defaults, **options, "return_lse": True}
    constants = {
        x for x, y in operands._asdict().items()
        if y is None or y.dtype.kind == "i" or x == "alibi_slopes"
    }  # fmt: skip

    @jax.jit
    def run(operands, dout):
        given = operands._asdict()

        def attention(differentiable):
            arguments = {**given, **differentiable}
            return function(**arguments, **options, implementation=family.name)

        differentiable = {x: y for x, y in given.items() if x not in constants}
        (out, lse), pullback = jax.vjp(attention, differentiable)
        return out, lse, *pullback((dout, jnp.ones_like(lse)))

    launches.clear()
    with use_target(target):
        *ours, gradients = jax.block_until_ready(run(operands, dout))
        launched = [*launches]
    spec = problem(**operands._asdict(), **options)[1]
    own = OWN[family.folder]
    tensors, backend = jax.tree.map(to_torch, operands), Backend(own, target)
    theirs = own.function("flash_fwd")(tensors, spec, backend)
    dlse = torch.ones_like(theirs[1])
    flash_bwd = own.function("flash_bwd")
    rest = theirs[2] if spec.terms else None
    expected = flash_bwd(to_torch(dout), dlse, tensors, *theirs[:2], rest, spec, backend)
    results = *theirs[:2], *expected[:3]
    for x, y in zip((*ours, *(gradients[x] for x in "qkv")), results, strict=True):
        np.testing.assert_array_equal(np.asarray(x), to_numpy(y))
    if getattr(operands, "bias", None) is not None:
        np.testing.assert_array_equal(np.asarray(gradients["bias"]), to_numpy(expected.bias))
    if operands.sinks is not None:  # a sum, which each framework takes itself
        np.testing.assert_allclose(gradients["sinks"], expected.sinks, rtol=1e-5, atol=1e-6)
    return launched


def dense(head_dim, dtype, **others):
    q, k, v, dout = problem(0, [(1, 70, h, head_dim) for h in (4, 2, 2, 4)], dtype)
    return FlashOperands(q, k, v)._replace(**others), dout


def packed(head_dim, dtype, lengths, **others):
    size = sum(lengths)
    q, k, v, dout = problem(0, [(size, h, head_dim) for h in (2, 1, 1, 2)], dtype)
    offsets = jnp.cumsum(jnp.array([0, *lengths], jnp.int32), dtype=jnp.int32)
    return VarlenOperands(q, k, v, offsets, offsets)._replace(**others), dout


@pytest.mark.parametrize(
    ("family", "target", "head_dim", "dtype", "deterministic"),
    [
        (GLUON, "sm80", 64, "bfloat16", False),
        (GLUON, "sm80", 64, "bfloat16", True),
        (GLUON_SM90, "sm90", 64, "float16", False),
        (GLUON_SM90, "sm90", 96, "bfloat16", True),
        (TORCH_TRITON, "sm80", 32, "float32", False),
    ],
)
def test_dense_attention(family, target, head_dim, dtype, deterministic, launches):
    (sinks,) = problem(1, [(4,)], "float32")
    operands, dout = dense(head_dim, dtype, sinks=sinks)
    options = {"causal": True, "softcap": 15.0, "deterministic": deterministic}
    launched = check(family, target, operands, dout, launches, **options)
    assert launched[0] == "flash_fwd"
    assert ("flash_bwd_fused" in launched) == (not deterministic and family is GLUON)


@pytest.mark.parametrize(
    ("family", "target", "head_dim"),
    [(GLUON, "sm80", 64), (GLUON_SM90, "sm90", 256), (TORCH_TRITON, "sm90", 32)],
)
def test_packed_sequences(family, target, head_dim, launches):
    operands, dout = packed(head_dim, "bfloat16", (3, 70))
    check(family, target, operands, dout, launches, causal=True, deterministic=True)


@pytest.mark.parametrize(
    ("family", "target"), [(TORCH_TRITON, "sm80"), (GLUON, "sm80"), (GLUON_SM90, "sm90")]
)
def test_segment_ids_in_a_tree(family, target, launches):
    ids = jnp.arange(70, dtype=jnp.int32)[None] // 30
    depths = jnp.arange(70, dtype=jnp.int32)[None] % 30
    operands, dout = dense(
        32, "float16", q_segment_ids=ids, kv_segment_ids=ids, q_depths=depths, kv_depths=depths,
        kv_ends=jnp.minimum(ids * 30 + 25, 70),
    )  # fmt: skip
    options = {"causal": True, "window_size": (9, None), "deterministic": True}
    check(family, target, operands, dout, launches, **options)


@pytest.mark.parametrize(
    ("family", "target", "number"),
    [(TORCH_TRITON, "sm80", 2), (GLUON, "sm80", 1), (GLUON_SM90, "sm90", 2)],
)
def test_ranges(family, target, number, launches):
    ranges = jnp.arange(70 * number * 2, dtype=jnp.int32).reshape(1, 70, number, 2) % 70
    operands, dout = dense(32, "float16", q_ranges=ranges)
    options = {"causal": True, "window_size": (9, None), "deterministic": True}
    check(family, target, operands, dout, launches, **options)


@pytest.mark.parametrize("heads", [4, 1])
def test_a_bias_and_its_gradient(heads, launches):
    (bias,) = problem(1, [(1, heads, 70, 70)], "bfloat16")
    operands, dout = dense(64, "bfloat16", bias=bias)
    check(GLUON_SM90, "sm90", operands, dout, launches, deterministic=True)


def test_a_forward_with_terms(launches):
    (bias,), slopes = problem(1, [(1, 4, 70, 72)], "bfloat16"), jnp.full(4, 0.1)
    q, k, v = problem(0, [(1, n, h, 64) for n, h in ((70, 4), (72, 2), (72, 2))], "bfloat16")
    operands = FlashOperands(q, k, v, bias=bias, alibi_slopes=slopes, dropout_seed=jnp.arange(2))
    options = {"dropout_rate": 0.2, "return_lse": True, "return_row_max": True}
    attention = partial(pallas_attn.flash_attention, **options, implementation="gluon")
    with use_target("sm90"):
        ours = jax.jit(lambda x: attention(**x._asdict()))(operands)
    assert launches == ["flash_fwd"]
    asked = {"causal": False, "scale": None, "window_size": None, "softcap": None, **options}
    asked |= {"precision": "ieee", "deterministic": False, "batch_invariant": False}
    spec = DENSE.problem(**operands._asdict(), **asked)[1]
    theirs = OWN["sm90"].function("flash_fwd")(
        jax.tree.map(to_torch, operands), spec, Backend(OWN["sm90"], "sm90")
    )
    out, lse, _rest, row_max = theirs
    for x, y in zip(ours, (out, lse, row_max), strict=True):
        np.testing.assert_array_equal(np.asarray(x), to_numpy(y))


def test_gradients_with_slopes_and_dropout(launches):
    terms = {"alibi_slopes": jnp.full(4, 0.1), "dropout_seed": jnp.arange(2, dtype=jnp.int32)}
    operands, dout = dense(32, "bfloat16", **terms)
    options = {"causal": True, "dropout_rate": 0.3, "deterministic": True}
    launched = check(GLUON_SM90, "sm90", operands, dout, launches, **options)
    assert launched == ["flash_fwd", "flash_bwd_dq", "flash_bwd_dkdv"]


@pytest.mark.parametrize("has_sinks", [False, True])
def test_vmap_makes_one_problem_where_it_can(has_sinks, launches):
    q, k, v = problem(0, [(2, 2, 33, h, 32) for h in (2, 1, 1)], "float32")
    (sinks,) = problem(1, [(2, 2)], "float32")
    ids = jnp.arange(2 * 2 * 33, dtype=jnp.int32).reshape(2, 2, 33) // 20

    def loss(q, k, v, sinks, ids):
        attention = partial(pallas_attn.flash_attention, implementation="torch_triton")
        options = {"sinks": sinks if has_sinks else None}
        options |= {"q_segment_ids": ids, "kv_segment_ids": ids}
        return (attention(q, k, v, **options) ** 2).sum()

    gradients = jax.grad(loss, (0, 1, 2, 3))
    ours = jax.block_until_ready(jax.jit(jax.vmap(gradients))(q, k, v, sinks, ids))
    assert launches.count("flash_fwd") == (2 if has_sinks else 1)
    for i in range(2):
        expected = jax.jit(gradients)(q[i], k[i], v[i], sinks[i], ids[i])
        for x, y in zip(ours, expected, strict=True):
            np.testing.assert_array_equal(x[i], y)


def test_scan_and_an_operand_that_vmap_leaves(launches):
    q, k, v = problem(0, [(1, 33, 2, 32)] * 3, "float32")
    attention = partial(pallas_attn.flash_attention, implementation="torch_triton")
    layers = jax.jit(lambda q: jax.lax.scan(lambda x, _: (attention(x, k, v), None), q, None, 2)[0])
    jitted = jax.jit(attention)
    np.testing.assert_array_equal(layers(q), jitted(jitted(q, k, v), k, v))
    for sinks in (None, jnp.ones(2)):
        one = partial(attention, k=k, v=v, sinks=sinks)
        many = jax.jit(jax.vmap(one))(jnp.stack([q, -q]))
        np.testing.assert_array_equal(many[1], jax.jit(one)(-q))


@pytest.mark.parametrize("family", [GLUON, GLUON_SM90, TORCH_TRITON], ids=lambda x: x.folder)
def test_every_feature_becomes_a_program(family):
    target = family.folder if family is not TORCH_TRITON else "sm90"
    name = "triton" if family is TORCH_TRITON else "gluon"
    specs = {
        (problem.feature, problem.sinks): problem.spec
        for problem in gate.problems("torch", target, name)
        if isinstance(problem.spec, AttentionSpec) and problem.head_dim == 64
    }
    backend, traced = Backend(OWN[family.folder], target), 0
    for (_, sinks), spec in specs.items():
        if family.supports("flash_fwd", spec, target) is not None:
            continue
        operands = flash_operands(
            spec, lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype), sinks
        )
        out, lse, *more = jax.eval_shape(
            partial(run_in_jax.run, backend, "flash_fwd", spec), operands
        )
        traced += 1
        if family.supports("flash_bwd", spec, target) is None:
            run = partial(run_in_jax.run, backend, "flash_bwd", spec)
            rest = more[0] if spec.terms else None
            gradients = jax.eval_shape(run, out, lse, operands, out, lse, rest)
            assert gradients.q.shape == operands.q.shape
        if family.supports("flash_jvp", spec, target) is None and not spec.has_lists:
            tangents = operands._make(
                x if name in DIFFERENTIABLE else None for name, x in operands._asdict().items()
            )
            run = partial(run_in_jax.run, backend, "flash_jvp", spec)
            rest = more[0] if spec.terms else None
            dout, dlse = jax.eval_shape(run, tangents, operands, out, lse, rest)
            assert (dout.shape, dlse.shape) == (out.shape, lse.shape)
    assert traced > (3 if family is GLUON else 4)


OTHERS = {
    "decode-fp8": ["paged_decode"], "decode-cascade": ["paged_decode"],
    "paged-page-7": ["paged_attention"], "append-rotary-interleaved": ["append_kv"],
    "bias-keys": ["flash_bwd_dq", "flash_jvp"],
    "varlen-batch-invariant": ["flash_fwd"], "paged-batch-invariant": ["paged_attention"],
    "spans": ["paged_decode", "combine"],
}  # fmt: skip
SPANS = DecodeCase(
    "", (2100,), tokens=2, page_size=64, max_pages=40, num_splits=2, sinks=True,
    batch_invariant=True,
)  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_operations(name, launches, monkeypatch):
    """A pool is a result, which torch writes in place."""
    choose_upcast = ptx.choose_upcast
    monkeypatch.setattr(ptx, "choose_upcast", lambda dtype, _: choose_upcast(dtype, None))
    named = (x for cases in KINDS for x in cases("small", name))
    case = SPANS if name == "spans" else next(named)
    inputs = make_inputs(case, "cpu")
    expected = Ours("torch_attn", "triton").start()(case, inputs)
    found = Ours("pallas_attn", "torch_triton", "sm80").start()(case, inputs)
    assert [x for x in OTHERS[name] if x in launches] == OTHERS[name], launches
    for x in expected:
        np.testing.assert_array_equal(to_numpy(found[x]), to_numpy(expected[x]), err_msg=x)


RANKS = ContextCase(
    "", batch=1, seq_q=138, seq_kv=138, heads_q=2, heads_kv=1, head_dim=64, causal=True, ranks=3,
    exchange="ring",
)  # fmt: skip
PARTS = {
    "sums": replace(RANKS, heads_q=1),
    "documents": replace(
        RANKS, ranks=2, sharding="stripe", documents=(60, 1, 60), sinks=True, softcap=3.0,
        deterministic=True,
    ),
}  # fmt: skip


@pytest.fixture
def of_long_parts(monkeypatch):
    """TMA adds to dq's sums for many queries, unless it is deterministic."""
    for condition in (">= 1024 keys", ">= 2048 keys"):
        monkeypatch.setitem(CONDITIONS, condition, lambda spec: True)
    config._shipped.cache_clear()
    yield
    monkeypatch.undo()
    config._shipped.cache_clear()


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_a_sequence(name, launches, of_long_parts):
    case = PARTS[name]
    inputs, subject = make_inputs(case, "cpu"), Ours("pallas_attn", "gluon", "sm90")
    assert subject.supports(case) is None
    assert_within_budget(subject.start()(case, inputs), inputs, case.spec)
    kernels = {"flash_bwd_dq", "flash_bwd_dkdv"}
    if not case.deterministic:
        kernels = {"flash_bwd_fused", "flash_bwd_postprocess"}
    assert {*launches} == {"flash_fwd", "flash_bwd_preprocess", *kernels}


def test_parts_after_a_gather(launches):
    """There is one part, so no result is kept in float32."""
    case = replace(RANKS, seq_q=140, seq_kv=140, exchange="gather", ranks=2)
    inputs = make_inputs(case, "cpu")
    inputs = {x: inputs[x] for x in "qkv"}
    found = Ours("pallas_attn", "gluon", "sm90").start()(case, inputs)
    assert_within_budget(found, inputs, case.spec)
    assert launches == ["flash_fwd"] * case.ranks


def test_parts_by_the_portable_kernels(launches):
    (case,) = (case for cases in KINDS for case in cases("small", "context-ring"))
    case = replace(case, ranks=2)
    inputs, subject = make_inputs(case, "cpu"), Ours("pallas_attn", "torch_triton", "sm80")
    assert subject.supports(case) is None
    assert_within_budget(subject.start()(case, inputs), inputs, case.spec)
    expected = {"flash_fwd", "flash_bwd_preprocess", "flash_bwd_dq", "flash_bwd_dkdv"}
    assert {*launches} == expected


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_rank_without_keys_changes_nothing(deterministic, of_long_parts):
    """The other ranks have a program of their own, and it gets zeros for keys."""
    q, dout, carry = problem(0, [(1, 150, 2, 64)] * 3, "bfloat16")
    carry, (lse,) = carry.astype("float32"), problem(1, [(1, 2, 150)], "float32")
    lse = lse.at[:, :, 140:].set(-jnp.inf)  # these rows have seen no key yet
    spec = replace(RANKS.part, seq_q=150, seq_kv=150, scale=1.0, deterministic=deterministic)
    nothing = [jnp.zeros(150, jnp.int32)] * 4
    part = PartialOperands(q, *[jnp.zeros((1, 150, 1, 64), q.dtype)] * 2, *nothing)

    @jax.jit
    def call():
        launch = partial(run_in_jax.run, Backend(OWN["sm90"], "sm90"))
        later = launch("partial_fwd", spec, part, carry, lse)
        last = launch("partial_fwd", replace(spec, last=True), part, carry, lse)
        first = launch("partial_fwd", replace(spec, first=True), part, None, None)
        rows = dout, lse, part, *last
        own = part._replace(k=q[:, :, :1], v=dout[:, :, :1], key_ends=nothing[0] + 150,
                            query_ends=nothing[0] + 150)  # fmt: skip
        before, *_ = launch("partial_bwd", spec, dout, lse, own, *last, None)
        after, *of_keys = launch("partial_bwd", spec, *rows, before)
        return later, last, first, (before.dq, after.dq), of_keys

    later, last, first, (before, after), of_keys = call()
    equal = np.testing.assert_array_equal
    equal(later[0], carry)
    equal(later[1], lse)
    rows = jnp.isfinite(lse)[0, 0][:, None, None]
    equal(last[0], jnp.where(rows, carry, 0).astype(q.dtype))
    np.testing.assert_allclose(last[1], lse, rtol=1e-6)
    equal(first[0], jnp.zeros_like(carry))
    equal(first[1], jnp.full_like(lse, -jnp.inf))
    assert jnp.abs(before).max() > 0
    equal(after, before)
    assert not any(x.any() for x in of_keys)


@pytest.mark.parametrize(
    ("change", "operation", "target", "reason"),
    [
        ({"dtype": "float32"}, "partial_fwd", "sm90", "take float16 and bfloat16, not float32"),
        ({"head_dim": 192}, "partial_bwd", "sm90", "have head dimensions up to 128"),
        ({"head_dim_v": 112}, "partial_fwd", "sm90", "two TMA descriptors of a result"),
        ({}, "partial_fwd", "sm80", "its kernels are for SM90"),
    ],
)
def test_parts_that_are_refused(change, operation, target, reason):
    spec = replace(RANKS.part, **change)
    with pytest.raises(NotImplementedError, match=f"implementation: expected .*{reason}"):
        choose("pallas_attn", "gluon", operation, spec, target, True)


LONG = replace(RANKS, seq_q=32768, seq_kv=32768, ranks=1, heads_q=4)


@pytest.mark.parametrize(
    ("change", "target", "name"),
    [
        ({}, "sm90", "gluon"), ({"deterministic": True}, "sm90", "gluon"),
        ({"head_dim": 192}, "sm90", "triton"), ({"seq_kv": 16}, "sm90", "triton"),
        ({}, "sm80", "triton"),
    ],
)  # fmt: skip
def test_none_takes_parts_where_they_are_faster(change, target, name):
    part = replace(LONG.part, **change)
    chosen, _ = choose("pallas_attn", None, "partial_bwd", part, target, True)
    assert chosen.family.name == name


def test_ranks_of_vmap_run_own_kernels_by_none():
    """Programs that are not lowered yet hold what runs on CUDA and what runs elsewhere."""
    q = jax.ShapeDtypeStruct((1, LONG.seq_q, LONG.heads_q, 64), "bfloat16")
    call = {"plan": LONG.plan, "axis_name": "context", "exchange": "ring"}
    mesh = jax.make_mesh((1,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(attend, q):
        return jnp.sum(attend(q, q, q).astype("float32"))

    with use_target("sm90"):
        over_mesh = partial(loss, partial(context_attention, mesh=mesh, **call))
        of_vmap = partial(loss, jax.vmap(partial(context_attention, **call), axis_name="context"))
        programs = [
            str(jax.make_jaxpr(jax.grad(over_mesh))(q)),
            str(jax.make_jaxpr(jax.grad(of_vmap))(jax.ShapeDtypeStruct((1, *q.shape), q.dtype))),
        ]
    assert ["pure_callback" in x for x in programs] == [True, False]


def test_explain_names_them_and_says_whose_they_are():
    q = jnp.zeros((1, 70, 2, 64), "float16")
    said = explain(pallas_attn.flash_attention, q, q, q)
    assert (said.by_name, said.foreign) == (("gluon", "torch_triton"), None)
    assert "kernels of the other side: gluon, torch_triton" in str(said)
    backend = Backend(GLUON, "sm80")
    said = describe("gluon", "flash_fwd", backend, (), SPEC, "a card", 108)
    assert (said.by_name, said.foreign) == ((), "torch_attn")
    assert "gluon (compiled, kernels of torch_attn, sm80 code on a card)" in str(said)


def simulated(parameters, written, zeroed, monkeypatch):
    jaxlib = SimpleNamespace(
        TritonKernel=lambda *args: args,
        TritonKernelCall=lambda kernel, x, y, z, given: SimpleNamespace(
            to_proto=lambda name, _: calls.append(given) or b""
        ),
        create_array_parameter=lambda size, align: ("array", size),
        create_scalar_parameter=lambda value, kind: ("scalar", value),
        create_tma_descriptor_parameter=lambda **fields: ("map", fields["shape"]),
    )
    calls, declared = [], [*range(len(parameters))]

    def assemble(compiled, order):
        declared[:] = order
        return b"code"

    monkeypatch.setattr(triton_call, "gpu_triton", jaxlib)
    monkeypatch.setattr(cubin, "assemble", assemble)
    buffers = arrange_buffers(parameters, written, zeroed)
    compiled = Compiled("f", b"code", 4, 0, (1, 1, 1), parameters, "", None)
    compiled = cubin.order_parameters(compiled, buffers)
    triton_call._opaque("f", compiled, 90, buffers, dict.fromkeys(zeroed, 12))
    (given,) = calls
    # As in jaxlib: each array and each map takes the next buffer, and CUDA the first parameters.
    passed = iter([*buffers.operands, *buffers.results])
    got, set_to_0 = {}, []
    for i, (kind, value) in enumerate(given):
        if kind != "scalar":
            operand = next(passed).operand
            set_to_0 += [operand] if kind == "array" and value else []
            value = ("map" if kind == "map" else "array", operand)
        if i < len(declared):
            got[declared[i]] = value
    assert next(passed, None) is None
    assert sorted(set_to_0) == sorted(zeroed)
    return got, buffers, declared


def test_each_parameter_gets_its_operand(monkeypatch):
    box = 0, 0, (8,), (1,), (8,)
    parameters = (
        Pointer(3), Descriptor(0, *box), Number(5, "i32"), Descriptor(0, *box), Descriptor(2, *box),
        Number(0.5, "fp32"), Pointer(1), Pointer(5), Pointer(6),
    )  # fmt: skip
    expected = [
        ("array", 3), ("map", 0), 5, ("map", 0), ("map", 2), 0.5, ("array", 1), ("array", 5),
        ("array", 6),
    ]  # fmt: skip
    got, buffers, order = simulated(parameters, (3, 2, 5, 6), (3, 2), monkeypatch)
    assert [got[i] for i in range(len(parameters))] == expected
    assert order == [*range(len(parameters))]  # the code that Triton made
    assert [x.operand for x in buffers.operands] == [3, 0, 0, 2, 1, 5, 6]
    assert {x.operand for x in buffers.results} == {2, 3, 5, 6}
    first = Descriptor(4, *box)
    got, buffers, order = simulated((first, *parameters, first), (4,), (), monkeypatch)
    assert got[len(parameters) + 1] == ("map", 4)
    assert order == [*range(len(parameters) + 2)]  # the result's second parameter is the last
    parameters = (first, *parameters[:-1], first, Pointer(6), Number(7, "i32"))
    got, buffers, order = simulated(parameters, (3, 2, 5, 6, 4), (3, 2), monkeypatch)
    expected = [("map", 4), *expected[:-1], ("map", 4), ("array", 6), 7]
    assert [got[i] for i in range(len(parameters))] == expected
    assert order[-1] == len(parameters) - 3
    assert buffers.results[0].operand == 4


def test_a_result_with_three_descriptors_is_refused(monkeypatch):
    box = 0, 0, (8,), (1,), (8,)
    with pytest.raises(NotImplementedError, match="at most two descriptors"):
        simulated((Descriptor(0, *box),) * 3, (0,), (), monkeypatch)
    spec = AttentionSpec(1, 64, 64, 1, 1, 112, 112, "float16", 1)
    assert "two TMA descriptors" in GLUON_SM90.supports("flash_fwd", spec, "sm90")
    spec = replace(spec, head_dim_v=96)
    assert GLUON_SM90.supports("flash_fwd", spec, "sm90") is None
    assert "two TMA descriptors" in GLUON_SM90.supports("flash_bwd", spec, "sm90")
    part = replace(RANKS.part, head_dim=112)
    assert GLUON_SM90.supports("partial_bwd", part, "sm90") is None


def test_a_result_that_a_later_launch_writes(launches, of_long_parts):
    """Programs that share a tile of keys add to sums, of which dk and dv are made."""
    shapes = [(1, size, heads, 64) for size, heads in ((64, 2), (256, 1), (256, 1), (64, 2))]
    q, k, v, dout = problem(0, shapes, "bfloat16")
    operands = FlashOperands(q, k, v)
    with mock.patch.dict(NUM_SMS, sm90=132):
        launched = check(GLUON_SM90, "sm90", operands, dout, launches, deterministic=False)
    assert launched[-3:] == ["flash_bwd_fused"] + ["flash_bwd_postprocess"] * 2
