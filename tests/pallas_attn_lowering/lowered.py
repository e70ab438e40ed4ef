import re

import jax

from twin_attention.targets.target import use_target


def of(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def batched(operands):
    return [of(3, *x.shape, dtype=x.dtype) for x in operands]


def lower(target, function, *operands):
    with use_target(target):
        traced = jax.jit(function).trace(*operands)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def kernels(text):
    return re.findall(r"custom_call @(\w+)", text)


def sharded_and_scanned(attention):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    heads = jax.P(None, None, "x")
    sharded = jax.shard_map(attention, mesh=mesh, in_specs=(heads,) * 3, out_specs=heads)

    def scanned(*qkv):
        return jax.lax.scan(lambda _, each: (None, attention(*each)), None, qkv)[1]

    return sharded, scanned
