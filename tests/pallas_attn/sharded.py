"""Hold operands that lie over a mesh to the whole problem, and say how devices exchange data.

A process of its own runs this, since JAX makes its devices once: ``python -m
tests.pallas_attn.sharded KIND=IMPLEMENTATION...``, with kinds of mesh axes and "None" for None.
"""

import re
import sys
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from jax import NamedSharding, P

from pallas_attn import flash_attention
from pallas_attn.kernels.portable import flash_fwd
from twin_attention.interop.parity import sides
from twin_attention.interop.parity.cases import (
    AppendCase,
    BlockSparseCase,
    DecodeCase,
    FlashCase,
    MergeCase,
    PagedCase,
    VarlenCase,
)
from twin_attention.interop.parity.check import agreements
from twin_attention.interop.parity.environment import choose_device
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.oracle import expectations, parts_of

SIZES = {"seq_q": 24, "seq_kv": 40, "heads_q": 4, "head_dim": 16, "dtype": "float32"}
PACKED = {"heads_q": 4, "head_dim": 16, "dtype": "float32", "lengths": ((9, 9), (20, 20))}
CACHE = {"heads_q": 4, "head_dim": 16, "dtype": "float16", "max_pages": 2}
# Axes of arrays: b is divided over "data", h over "model".
DENSE = {
    "bh": "alibi_slopes", "bh..": "bias block_mask", "b.h.": "q k v dout", "bh.": "dlse",
    "h": "sinks", "h.": "relative_bias", "b.": "q_segment_ids kv_segment_ids",
}  # fmt: skip
HEADS = {".h.": "q k v dout", "h.": "dlse", "h": "sinks"}
POOL = {"..h.": "k_pages v_pages"}
ROWS = {**POOL, "b.h.": "q", "b.": "block_tables", "b": "seq_lens", "h": "sinks"}
STATES = {".b.h.": "outs", ".bh.": "lses", "b.h.": "dout", "bh.": "dlse"}
TERMS = {"sinks": True, "segments": "documents", "bias": "hqk", "relative": 3, "alibi": "heads"}
# Cases, the axes of their arrays, and what devices exchange.
CASES = (
    (FlashCase("sums", **SIZES, heads_kv=2, **TERMS), DENSE, {"all-reduce"}),
    (FlashCase("own", **SIZES, heads_kv=2, causal=True, bias="bhqk", alibi="all", dropout_rate=0.5),
     DENSE, set()),
    (FlashCase("one kv head", **SIZES, heads_kv=1, softcap=3.0, dropout_rate=0.5, bias="bhqk"),
     DENSE, {"all-reduce"}),
    (VarlenCase("packed", **PACKED, sinks=True, dropout_rate=0.5), HEADS, set()),
    (BlockSparseCase("tiles", batch=2, seq_q=130, seq_kv=130, heads_q=4, heads_kv=2, head_dim=16,
                     dtype="float32", own_masks="heads"), DENSE, set()),
    (DecodeCase("decode", **CACHE, lengths=(5, 30), sinks=True, tokens=2), ROWS, set()),
    (PagedCase("paged", **CACHE, lengths=(5, 30), new_tokens=(1, 20)), HEADS | POOL, set()),
    (AppendCase("append", lengths=(5, 30), head_dim=16), {".h.": "k_new v_new"} | POOL, set()),
    (MergeCase("merge", head_dim_v=16), STATES, set()),
)  # fmt: skip
EXCHANGES = r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("


class ShardedSide(sides.PallasSide):
    def __init__(self, mesh, axes):
        self.mesh, self.exchanged = mesh, set()
        self.axes = {name: x for x, names in axes.items() for name in names.split()}

    def share(self, tensors):
        return {x: self.place(x, array) for x, array in super().share(tensors).items()}

    def place(self, name, x):
        letters, sizes = self.axes.get(name, "").rjust(x.ndim, "."), dict(self.mesh.shape)
        axes = [{"b": "data", "h": "model"}.get(x) for x in letters[len(letters) - x.ndim :]]
        pairs = zip(axes, x.shape, strict=True)
        places = [axis if axis and size % sizes[axis] == 0 else None for axis, size in pairs]
        return jax.device_put(x, NamedSharding(self.mesh, P(*places)))

    def _compile(self, *args):
        function = super()._compile(*args)

        def run(*arrays):
            compiled = function.lower(*arrays).compile()
            self.exchanged |= {*re.findall(EXCHANGES, compiled.as_text())}
            return jax.device_put(compiled(*arrays), jax.devices()[0])

        return run


def check(mesh, case, axes, exchanged, implementation):
    inputs = make_inputs(case, choose_device())
    side = ShardedSide(mesh, axes)
    got = sides.call(side, case, inputs, implementation)
    (expected,) = expectations(inputs, parts_of(case.spec))
    for name, agreement in agreements(got, expected).items():
        assert agreement.ok, (implementation, case.name, name, agreement)
    assert side.exchanged <= exchanged, (implementation, case.name, side.exchanged)


def check_mapped(mesh, implementation):
    """Attention written for one sequence, mapped over a divided batch."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 24, 4, 16))

    def loss(implementation, *qkv):
        one = lambda *x: flash_attention(*(y[None] for y in x), implementation=implementation)  # noqa: E731
        return (jax.vmap(one)(*qkv) ** 2).sum()

    gradients = [jax.grad(partial(loss, x), (0, 1, 2)) for x in (implementation, "reference")]
    placed = [jax.device_put(x, NamedSharding(mesh, P("data", None, "model"))) for x in (q, k, v)]
    compiled = jax.jit(gradients[0]).lower(*placed).compile()
    assert not re.findall(EXCHANGES, compiled.as_text())
    for a, b in zip(compiled(*placed), jax.jit(gradients[1])(q, k, v), strict=True):
        assert a.sharding.is_equivalent_to(placed[0].sharding, 4)
        assert jnp.allclose(a, jax.device_put(b, a.sharding), rtol=1e-4, atol=1e-4)


def check_tangents(mesh):
    """Also of `shard_map`, with its defaults, and within it."""
    q, k, v, *step = jax.random.normal(jax.random.key(0), (6, 2, 8, 4, 16))
    place = P("data", None, "model")
    attend = partial(flash_attention, return_lse=True)
    of_parts = jax.shard_map(
        attend, mesh=mesh, in_specs=(place,) * 3, out_specs=(place, P("data", "model"))
    )

    def jvp(attend, *arrays):
        return jax.jvp(attend, arrays[:3], arrays[3:])[1]

    def linearized(*arrays):
        return jax.linearize(attend, *arrays[:3])[1](*arrays[3:])

    on_parts = jax.shard_map(
        linearized, mesh=mesh, in_specs=(place,) * 6, out_specs=(place, P("data", "model"))
    )
    want = jvp(attend, q, k, v, *step)
    placed = [jax.device_put(x, NamedSharding(mesh, place)) for x in (q, k, v, *step)]
    for f in (partial(jvp, attend), partial(jvp, of_parts), on_parts):
        compiled = jax.jit(f).lower(*placed).compile()
        assert not re.findall(EXCHANGES, compiled.as_text())
        for a, b in zip(compiled(*placed), want, strict=True):
            assert jnp.allclose(a, jax.device_put(b, a.sharding), rtol=1e-4, atol=1e-4)


def with_table(function):
    """Let a kernel's program have a constant, as schedules of Mosaic's kernels are."""
    table = np.zeros((7, 3), np.int32)

    def run(*args):
        out, *others = function(*args)
        return out + jnp.asarray(table)[0, 0].astype(out.dtype), *others

    return run


if __name__ == "__main__":
    flash_fwd.flash_fwd = with_table(flash_fwd.flash_fwd)
    half = len(jax.devices()) // 2
    for chosen, sizes in product(sys.argv[1:], ((2, half), (half, 2))[: 1 + (half == 1)]):
        name, _, implementation = chosen.partition("=")
        implementation = None if implementation == "None" else implementation
        kind = jax.sharding.AxisType[name]
        mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=(kind,) * 2)
        for case, *expected in CASES:
            check(mesh, case, *expected, implementation)
        if kind == jax.sharding.AxisType.Auto:
            check_mapped(mesh, implementation)
        check_tangents(mesh)
        if sizes == (2, 2):  # two devices share each of two kv heads
            mesh = jax.make_mesh((1, 4), ("data", "model"), axis_types=(kind,) * 2)
            case = FlashCase("kv heads", **SIZES, heads_kv=2, bias="bhqk")
            check(mesh, case, DENSE, {"all-reduce"}, implementation)
    print("ok")
