import inspect
from dataclasses import replace
from functools import partial
from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import pallas_attn
from pallas_attn import append_kv, check_pages, merge_states, paged_decode
from tests.oracle import assert_within_budget
from tests.sides import EXPLICIT
from twin_attention.interop.parity.cases import DecodeCase, MergeCase
from twin_attention.interop.parity.check import agreements
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.oracle import expectations, parts_of

CPU = jax.devices("cpu")[0]
POOLS = ("k_pages", "v_pages")
CASE = DecodeCase(
    "transformations", lengths=(0, 5, 16, 23), tokens=3, head_dim=16, head_dim_v=32,
    dtype="float16", page_size=8, max_pages=3, window_size=(18, 0), softcap=8.0,
)  # fmt: skip
LATER = replace(CASE, lengths=(8, 24, 1, 9))


def operands(case):
    return {name: jnp.asarray(x.numpy()) for name, x in make_inputs(case, "cpu").items()}


def to_torch(x):
    return torch.from_numpy(np.array(x))


def assert_right(got, operands, spec):
    tensors = {name: to_torch(x) for name, x in operands.items()}
    assert_within_budget([*map(to_torch, got)], tensors, spec)


def assert_same(got, want):
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture
def decode(implementation):
    return partial(paged_decode, **CASE.options, return_lse=True, implementation=implementation)


@pytest.mark.parametrize("tokens", [None, 3])
def test_lengths_and_tables_change_without_tracing_anew(decode, tokens):
    # JAX 0.11 loads more of Pallas in a process's first call, after which it traces once again.
    decode(**operands(CASE))
    traced = []

    @jax.jit
    def run(operands):
        traced.append(True)
        return decode(**operands)

    for case in (replace(CASE, tokens=tokens), replace(LATER, tokens=tokens)):
        inputs = operands(case)
        assert_right(run(inputs), inputs, case.spec)
    assert len(traced) == 1


@pytest.mark.parametrize("x64", [False, True])
def test_outside_jit(decode, x64):
    inputs = operands(CASE)
    with jax.enable_x64(x64):
        assert_right(decode(**inputs), inputs, CASE.spec)


def test_vmap_over_sequences_of_one_pool(decode):
    inputs = operands(CASE)
    axes = {name: None if name in POOLS else 0 for name in inputs}
    halves = {
        name: x if name in POOLS else x.reshape(2, -1, *x.shape[1:]) for name, x in inputs.items()
    }
    mapped = jax.jit(jax.vmap(lambda operands: decode(**operands), in_axes=(axes,)))
    out, lse = (x.reshape(-1, *x.shape[2:]) for x in mapped(halves))
    assert_right((out, lse), inputs, CASE.spec)


def test_vmap_over_trees(decode, implementation):
    if implementation in EXPLICIT:
        pytest.skip("its kernels take no trees")
    case = replace(CASE, window_size=None, tree="drafts")
    inputs = operands(case)
    ends = jnp.stack([inputs["tree_ends"], jnp.full_like(inputs["tree_ends"], 3)])
    mapped = jax.vmap(lambda ends: decode(**inputs | {"tree_ends": ends}, window_size=None))
    outs, lses = mapped(ends)
    for tree_ends, out, lse in zip(ends, outs, lses, strict=True):
        assert_right((out, lse), inputs | {"tree_ends": tree_ends}, case.spec)


def test_vmap_over_pools(decode):
    both = operands(CASE), operands(LATER)
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs, axis=1), *both)
    outs, lses = jax.jit(jax.vmap(lambda operands: decode(**operands), in_axes=1))(stacked)
    for inputs, out, lse in zip(both, outs, lses, strict=True):
        assert_right((out, lse), inputs, CASE.spec)


def normal(shape, dtype, seed):
    # Not from jax.random, which a CPU takes seconds to compile for each shape.
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def new_tokens(seed=0):
    spec = CASE.spec
    rows = spec.batch, spec.tokens, spec.heads_kv
    k_new = normal((*rows, spec.head_dim), jnp.float16, seed)
    return k_new, normal((*rows, spec.head_dim_v), jnp.float16, seed + 100)


def written(new, k_pages, v_pages, block_tables, seq_lens):
    pools = np.array(k_pages), np.array(v_pages)
    num_pages, page_size = k_pages.shape[:2]
    tables, lengths = np.asarray(block_tables), np.asarray(seq_lens)
    batch, tokens = new[0].shape[:2]
    for b, t in np.ndindex(batch, tokens):
        position = int(lengths[b]) - tokens + t
        if not 0 <= position < tables.shape[1] * page_size:
            continue
        page = tables[b, position // page_size]
        if 0 <= page < num_pages:
            for pool, x in zip(pools, new, strict=True):
                pool[page, position % page_size] = x[b, t]
    return pools


@pytest.fixture
def cache():
    """Some new tokens have no place in the pools."""
    tables = np.array([[4, 1, 5], [0, 2, -1], [-1, 6, 3], [2**31 - 1, 7, 8]], np.int32)
    lengths = np.array([8, 17, 2, 26], np.int32)
    pools = (operands(CASE)[name] for name in POOLS)
    return [*pools, jnp.asarray(tables), jnp.asarray(lengths)]


@pytest.mark.parametrize("lengths", [(8, 17, 2, 26), (0, 27, -(2**31), 2**31 - 1)])
def test_append_outside_jit_gives_new_pools(implementation, cache, lengths):
    *pools_and_tables, _ = cache
    arguments = [*pools_and_tables, jnp.array(lengths, jnp.int32)]
    new, before = new_tokens(), jax.tree.map(np.array, arguments)
    got = append_kv(*new, *arguments, implementation=implementation)
    assert_same(got, written(new, *arguments))
    assert_same(arguments, before)


def test_append_writes_donated_pools_in_place(implementation, cache):
    new, want = new_tokens(), written(new_tokens(), *cache)
    pools = cache[:2]
    memory = [pool.unsafe_buffer_pointer() for pool in pools]
    append = jax.jit(partial(append_kv, implementation=implementation), donate_argnames=POOLS)
    got = append(*new, *cache)
    assert [pool.unsafe_buffer_pointer() for pool in got] == memory
    assert all(pool.is_deleted() for pool in pools)
    assert_same(got, want)


def test_append_copies_no_donated_pool(implementation):
    # Of 8 bits: XLA's scatter on a CPU, before JAX 0.11, widens 16-bit pools and back.
    pool = jax.ShapeDtypeStruct((1000, 16, 2, 64), jnp.int8)
    new = jax.ShapeDtypeStruct((4, 2, 64), jnp.float16)
    tables, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4, 10), (4,)))
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    append = jax.jit(partial(append_kv, implementation=implementation), donate_argnames=POOLS)
    lowered = append.lower(new, new, pool, pool, tables, lengths, k_scale=scale, v_scale=scale)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < pool.size / 8


def test_a_loop_of_append_and_decode(decode):
    """A scan carries the pools and gives what all tokens at once do."""
    append = partial(append_kv, implementation=decode.keywords["implementation"])
    inputs, new = operands(CASE), new_tokens()
    pools = tuple(jnp.nan_to_num(inputs[name]) for name in POOLS)
    tables = jnp.arange(12, dtype=jnp.int32).reshape(4, 3)
    start = jnp.array([0, 5, 15, 21], jnp.int32)

    def step(carry, tokens):
        pools, lengths = carry
        q, k, v = tokens
        lengths = lengths + 1
        pools = append(k, v, *pools, tables, lengths)
        return (pools, lengths), decode(q, *pools, tables, lengths)

    tokens = [jnp.moveaxis(x, 1, 0) for x in (inputs["q"], *new)]
    loop = jax.jit(partial(jax.lax.scan, step))
    (got, lengths), (outs, lses) = loop((pools, start), tokens)
    assert_same(got, written(new, *pools, tables, lengths))
    at_the_end = dict(zip(inputs, (inputs["q"], *got, tables, lengths), strict=True))
    results = jnp.moveaxis(outs, 0, 1), jnp.moveaxis(lses, 0, 2)
    assert_right(results, at_the_end, CASE.spec)


MERGES = [MergeCase(x, head_dim_v=16, dtype="float16") for x in ("transformations", "others")]


def test_vmap_of_merge(implementation):
    inputs = [make_inputs(case, "cpu") for case in MERGES]
    stacked = [jnp.stack([jnp.asarray(x[n].numpy()) for x in inputs]) for n in ("outs", "lses")]
    merge = partial(merge_states, implementation=implementation)
    for own, case, *got in zip(inputs, MERGES, *jax.jit(jax.vmap(merge))(*stacked), strict=True):
        forward = {name: own[name] for name in ("outs", "lses")}
        assert_right(got, forward, case.spec)


def decode_of(name):
    return lambda x: paged_decode(**(operands(CASE) | {name: x}), implementation="reference")


def append_of(k_new):
    inputs = operands(CASE)
    arguments = [inputs[name] for name in (*POOLS, "block_tables", "seq_lens")]
    return append_kv(k_new, new_tokens()[1], *arguments, implementation="reference")


DERIVATIVES = {
    "paged_decode-q": (decode_of("q"), lambda: operands(CASE)["q"]),
    "paged_decode-k_pages": (decode_of("k_pages"), lambda: operands(CASE)["k_pages"]),
    "append_kv": (append_of, lambda: new_tokens()[0]),
}


def reverse(function, x):
    return jax.vjp(function, x)


def forward(function, x):
    return jax.jvp(function, (x,), (x,))


@pytest.mark.parametrize("mode", [reverse, forward])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_a_gradient_is_refused(name, wrap, mode):
    function, operand = DERIVATIVES[name]
    message = rf"^{name.split('-')[0]}: a gradient is not supported"
    with pytest.raises(NotImplementedError, match=message):
        mode(wrap(function), operand())


def test_gradients_of_a_merge_jitted_and_mapped():
    inputs = [make_inputs(x, "cpu") for x in MERGES]
    names = "douts", "dlses"

    def pull(outs, lses, dout, dlse):
        merge = partial(merge_states, implementation="reference")
        return jax.vjp(merge, outs, lses)[1]((dout, dlse))

    arrays = [[jnp.asarray(x.numpy()) for x in each.values()] for each in inputs]
    mapped = jax.jit(jax.vmap(pull))(*map(jnp.stack, zip(*arrays, strict=True)))
    for i, of_one in enumerate(inputs):
        (expected,) = expectations(of_one, parts_of(MERGES[0].spec))
        for got in (jax.jit(pull)(*arrays[i]), [x[i] for x in mapped]):
            found = {n: torch.from_numpy(np.array(x)) for n, x in zip(names, got, strict=True)}
            for name, agreement in agreements(found, expected).items():
                assert agreement.ok, (name, agreement)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_operands_that_need_no_gradient_are_taken_under_grad(decode, wrap):
    inputs = operands(CASE)

    @wrap
    def loss(x):
        stopped = jax.lax.stop_gradient(x) * inputs["q"]
        out, _ = decode(**(inputs | {"q": stopped}))
        return x * jnp.any(out != 0)

    assert jax.grad(loss)(jnp.float16(2)) == 1


def test_check_pages_needs_values():
    inputs = operands(CASE)
    arguments = inputs["k_pages"], inputs["block_tables"], inputs["seq_lens"]
    assert check_pages(*arguments) is None
    with pytest.raises(ValueError, match=r"^seq_lens\[3\]: expected a length from 0 to 24, got 25"):
        check_pages(*arguments[:2], inputs["seq_lens"].at[3].set(25))
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(check_pages)(*arguments)


@pytest.mark.parametrize("name", pallas_attn.__all__)
def test_the_example_of_a_docstring_runs(name):
    _, example = inspect.getdoc(getattr(pallas_attn, name)).split("Example::\n")
    exec(compile(dedent(example), name, "exec"), {})
