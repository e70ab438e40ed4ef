import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    init_device_mesh,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

import torch_attn
import torch_attn.distributed
import torch_attn.flops
from twin_attention.contract.cost import backward_flops, forward_flops
from twin_attention.contract.spec import AttentionSpec, Window

RANKS = 4


@pytest.fixture(scope="module")
def mesh():
    """Only the first of four devices exists, without communication."""
    torch.distributed.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield init_device_mesh("cpu", (RANKS,))
    torch.distributed.destroy_process_group()


def tensors():
    torch.manual_seed(0)
    return (
        torch.randn(4, 5, 16, 16, requires_grad=True),
        torch.randn(4, 7, 8, 16, requires_grad=True),
        torch.randn(4, 7, 8, 24, requires_grad=True),
    )


def attend(*operands):
    q, k, v, *sinks = operands
    out, lse = torch_attn.flash_attention(
        q, k, v, sinks=sinks[0] if sinks else None, causal=True, softcap=9.0, return_lse=True
    )
    return out, lse, *torch.autograd.grad((out, lse), operands, (2 * out, 3 * lse))


# By a tensor's dimensions, where q, k and v are sharded by batch or by heads.
PLACEMENTS = {
    Shard(0): {4: Shard(0), 3: Shard(0), 1: Replicate()},
    Shard(2): {4: Shard(2), 3: Shard(1), 1: Shard(0)},
}
by_batch_or_heads = pytest.mark.parametrize("placement", [Shard(0), Shard(2)], ids=str)


def placed(x: torch.Tensor, placements) -> tuple[Placement, ...]:
    return tuple(PLACEMENTS[p][x.ndim] for p in placements)


def local(x: torch.Tensor, placements, mesh: DeviceMesh) -> torch.Tensor:
    for i, placement in enumerate(placements):
        if isinstance(placement, Shard):
            x = x.chunk(mesh.size(i), placement.dim)[0]
    return x.detach().clone().requires_grad_(x.requires_grad)


def check(mesh, placements, attend, whole, of_operands, of_last=None) -> None:
    """Hold the first device's results to its shard of the whole.

    The last gradient is the device's own, placed as `of_last` says, if given.
    """
    given = [local(x, p, mesh) for x, p in zip(whole, of_operands, strict=True)]
    results = attend(
        *(DTensor.from_local(x, mesh, p) for x, p in zip(given, of_operands, strict=True))
    )
    wanted = attend(*whole)
    if of_last is not None:
        *results, last = results
        assert last.placements == of_last
        torch.testing.assert_close(last.to_local(), attend(*given)[-1])
        assert last.shape == wanted[-1].shape
    for x, want in zip(results, wanted, strict=of_last is None):
        assert x.placements == placed(want, placements)
        assert x.shape == want.shape
        torch.testing.assert_close(x.to_local(), local(want, x.placements, mesh))


@pytest.mark.parametrize("placements", [(Shard(0),), (Shard(2),), (Shard(0), Shard(2))], ids=str)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_shards_of_batch_and_heads_are_computed_alone(mesh, placements, with_sinks):
    if len(placements) == 2:
        mesh = init_device_mesh("cpu", (2, 2))
    whole = [*tensors(), *([torch.randn(16, requires_grad=True)] if with_sinks else [])]
    of_sinks = tuple(Partial() if p == Shard(0) else Shard(0) for p in placements)
    of_operands = [placed(x, placements) for x in whole]
    check(mesh, placements, attend, whole, of_operands, of_sinks if with_sinks else None)


@by_batch_or_heads
def test_segment_ids_and_trees_go_with_the_batch(mesh, placement):
    def attend(q, k, v, q_ids, kv_ids, ends, q_depths, kv_depths):
        ids = {"q_segment_ids": q_ids, "kv_segment_ids": kv_ids}
        tree = {"kv_ends": ends, "q_depths": q_depths, "kv_depths": kv_depths}
        options = {"causal": True, "window_size": (3, None)}
        out = torch_attn.flash_attention(q, k, v, **ids, **tree, **options)
        return out, *torch.autograd.grad(out, (q, k, v), 2 * out)

    segments = [torch.arange(4 * size).view(4, size).int() % 3 - 1 for size in (5, 7)]
    tree = [torch.arange(4 * size).view(4, size).int() % 11 for size in (7, 5, 7)]
    of_ids = placement if placement == Shard(0) else Replicate()
    of_operands = [[placement]] * 3 + [[of_ids]] * 5
    check(mesh, [placement], attend, [*tensors(), *segments, *tree], of_operands)


@by_batch_or_heads
@pytest.mark.parametrize("own_slopes", [False, True])
def test_terms_go_with_the_heads(mesh, placement, own_slopes):
    def attend(q, k, v, table, slopes):
        terms = {"relative_bias": table, "alibi_slopes": slopes}
        out = torch_attn.flash_attention(q, k, v, **terms)
        return out, *torch.autograd.grad(out, (q, k, v, table), 2 * out)

    slopes = torch.rand(4, 16) if own_slopes else torch.rand(16)
    whole = [*tensors(), torch.randn(16, 9, requires_grad=True), slopes]
    of_heads = Replicate() if placement == Shard(0) else Shard(0)
    of_slopes = of_heads
    if own_slopes:
        of_slopes = Shard(0) if placement == Shard(0) else Shard(1)
    of_operands = [[placement]] * 3 + [[of_heads], [of_slopes]]
    of_table = (Partial() if placement == Shard(0) else Shard(0),)
    check(mesh, [placement], attend, whole, of_operands, of_table)


@by_batch_or_heads
@pytest.mark.parametrize("sizes", [(4, 16), (1, 16), (4, 1), (1, 1)], ids=str)
def test_a_bias_goes_with_the_axis_that_it_has(mesh, placement, sizes):
    def attend(q, k, v, bias):
        out = torch_attn.flash_attention(q, k, v, bias=bias)
        return out, *torch.autograd.grad(out, (q, k, v, bias), 2 * out)

    axis = 0 if placement == Shard(0) else 1
    of_bias = Shard(axis) if sizes[axis] > 1 else Replicate()
    whole = [*tensors(), torch.randn(*sizes, 5, 7, requires_grad=True)]
    of_gradient = (of_bias if sizes[axis] > 1 else Partial(),)
    check(mesh, [placement], attend, whole, [[placement]] * 3 + [[of_bias]], of_gradient)


def test_dropout_counts_the_whole_batch_and_all_heads(mesh):
    seed = torch.tensor([1, 2], dtype=torch.int32)
    whole = tensors()
    shards = [DTensor.from_local(local(x, [Shard(0)], mesh), mesh, [Shard(0)]) for x in whole]
    of_seed = DTensor.from_local(seed, mesh, [Replicate()])
    out = torch_attn.flash_attention(*shards, dropout_rate=0.5, dropout_seed=of_seed)
    assert out.placements == (Replicate(),)


def test_heads_that_do_not_divide_are_not_sharded(mesh):
    """Six kv heads on four devices would leave query heads without their kv heads."""
    q, k = torch.randn(4, 5, 12, 16), torch.randn(4, 7, 6, 16)
    q, k = (DTensor.from_local(x, mesh, [Replicate()]) for x in (q, k))
    q, k = (x.redistribute(mesh, [Shard(2)]) for x in (q, k))
    out = torch_attn.flash_attention(q, k, k)
    assert out.placements != (Shard(2),)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_flops_are_counted(implementation):
    q, k, v = (x[:2, :, ::4] for x in tensors())
    options = {"causal": True, "window_size": (3, None), "implementation": implementation}
    spec = AttentionSpec(2, 5, 7, 4, 2, 16, 24, "float32", 0.25, Window(3, 0))
    with FlopCounterMode(display=False) as counter:
        out = torch_attn.flash_attention(q, k, v, **options)
    assert counter.get_total_flops() == forward_flops(spec) > 0
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == backward_flops(spec)
    with FlopCounterMode(display=False) as counter:
        torch.func.jvp(lambda q: torch_attn.flash_attention(q, k, v, **options), (q,), (q,))
    assert counter.get_total_flops() == forward_flops(spec) + backward_flops(spec)


def test_flops_are_those_of_the_tiles_that_a_mask_keeps():
    q, k, v = (torch.randn(2, n, 4, 16, requires_grad=True) for n in (100, 130, 130))
    kept = torch.tensor([[1, 0, 1], [0, 1, 0]]).bool()

    def counts(kept, causal):
        with FlopCounterMode(display=False) as counter:
            out = torch_attn.block_sparse_attention(q, k, v, kept, causal=causal)
        with FlopCounterMode(display=False) as of_backward:
            out.sum().backward()
        return counter.get_total_flops(), of_backward.get_total_flops()

    for causal in (False, True):
        seen = torch.ones(100, 130).tril(30) if causal else torch.ones(100, 130)
        of_pairs = kept.repeat_interleave(64, 0)[:100].repeat_interleave(64, 1)[:, :130]
        pairs = int((of_pairs * seen).sum())
        assert counts(kept, causal) == (2 * (16 + 16) * 2 * 4 * pairs, 2 * 5 * 16 * 2 * 4 * pairs)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        q, k, v = (mode.from_tensor(x) for x in (q, k, v))
        pairs = 100 * 130
        assert counts(mode.from_tensor(kept), False)[0] == 2 * (16 + 16) * 2 * 4 * pairs


def test_flops_do_not_depend_on_other_data():
    q, k, v = tensors()
    offsets = torch.tensor([0, 3, 5], dtype=torch.int32)
    ids = [torch.zeros(x.shape[:2], dtype=torch.int32).fill_(-1) for x in (q, k)]
    counts = []
    for options in ({}, dict(zip(("q_segment_ids", "kv_segment_ids"), ids, strict=True))):
        with FlopCounterMode(display=False) as counter:
            torch_attn.flash_attention(q, k, v, **options).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    with FlopCounterMode(display=False) as counter:
        torch_attn.flash_attention_varlen(q[0], k[0], v[0], offsets, offsets).sum().backward()
    assert counter.get_total_flops() == 0
