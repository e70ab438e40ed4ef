"""Two processes: RANK SIZE FILE cuda [dies] is one of a group on GPUs, or both on a CPU."""

import os
import sys
from dataclasses import replace
from datetime import timedelta

import torch
import torch._dynamo  # otherwise DTensor imports it after the fork, in each process
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel

import torch_attn
from torch_attn.distributed import context_attention, context_plan, shard_sequence
from torch_attn.distributed.copies import copies_of
from torch_attn.distributed.peers import GroupPeers


def check(mesh, plan, exchange):
    torch.manual_seed(0)
    device = torch.get_default_device()
    shapes = ((2, plan.seq_len, heads, 16) for heads in (4, 2, 2, 4))
    *whole, dout = (torch.randn(x, device="cpu").to(device) for x in shapes)
    whole = [x.requires_grad_() for x in whole]
    options = {"causal": True, "window_size": (20, None), "return_lse": True}
    expected = torch_attn.flash_attention(*whole, **options)
    expected += torch.autograd.grad(expected[0], whole, dout)
    rank = dist.get_rank()
    own = [shard_sequence(x.detach(), plan, rank).requires_grad_() for x in whole]
    got = context_attention(*own, plan=plan, mesh=mesh, exchange=exchange, **options)
    got += torch.autograd.grad(got[0], own, shard_sequence(dout, plan, rank))
    for n, (x, y) in enumerate(zip(got, expected, strict=True)):
        torch.testing.assert_close(x, shard_sequence(y, plan, rank, 2 if n == 1 else 1))


def check_torch_conventions(mesh, rank):
    """Plans give a rank the tokens that PyTorch's `context_parallel` and DTensor give it."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 64, 4, 16)
    expected = torch_attn.flash_attention(q, k, v, causal=True)
    own = [q.clone(), k.clone(), v.clone()]
    plan = context_plan(64, mesh.size())
    with context_parallel(mesh, buffers=own, buffer_seq_dims=[1, 1, 1]):
        out = context_attention(*own, plan=plan, mesh=mesh, causal=True)
        torch.testing.assert_close(out, shard_sequence(expected, plan, rank))
    own = [distribute_tensor(x, mesh, [Shard(1)]).to_local() for x in (q, k, v)]
    plan = context_plan(64, mesh.size(), "contiguous")
    out = context_attention(*own, plan=plan, mesh=mesh, causal=True)
    whole = DTensor.from_local(out, mesh, [Shard(1)]).full_tensor()
    torch.testing.assert_close(whole, expected)


def check_that_all_raise(plan):
    """A rank that fails late ends the others by the group's time limit."""
    q, k, v = torch.zeros(3, 1, plan.local_len, 2, 16)
    call = {"plan": plan, "mesh": dist.group.WORLD, "exchange": "ring", "causal": True}
    context_attention(q, k, v, **call)
    if dist.get_rank() == 1:
        dist.destroy_process_group()  # as a process that dies does
        return
    try:
        for _ in range(3):
            context_attention(q, k, v, **call)
    except RuntimeError:
        return
    raise AssertionError("a rank did not notice that another one is gone")


def check_on_gpus(rank, size):
    for _ in range(3):
        for exchange, layout in (*WAYS, ("ring", "contiguous")):
            for length in (96, 768, 192):
                check(dist.group.WORLD, context_plan(length, size, layout), exchange)
    print("copies", int(copies_of(dist.group.WORLD, torch.device("cuda", rank)) is not None))


def check_cases(size):
    from tests.oracle import assert_within_budget  # which a CPU's ranks need not wait for
    from tests.torch_attn.test_context import attend
    from twin_attention.interop.parity.inputs import make_inputs
    from twin_attention.interop.parity.suites.context import context_cases

    def run(size, on_rank):
        found = [None] * size
        dist.all_gather_object(found, [x.cpu() for x in on_rank(GroupPeers(dist.group.WORLD))])
        return [[x.to(torch.get_default_device()) for x in of_rank] for of_rank in found]

    for case in context_cases("full", "context-full-bf16"):
        if case.name.removeprefix("context-full-bf16-") in ON_GPUS:
            case = replace(case, ranks=size)
            inputs = make_inputs(case, torch.get_default_device())
            for _ in range(3):
                got = attend(run, case, case.plan, inputs, exchange=case.exchange)
                assert_within_budget(got, inputs, case.spec)


def die(rank, size):
    plan = context_plan(96, size)
    q, k, v = torch.zeros(3, 1, plan.local_len, 2, 16)
    call = {"plan": plan, "mesh": dist.group.WORLD, "exchange": "ring", "causal": True}
    context_attention(q, k, v, **call)
    torch.cuda.synchronize()
    if rank == 1:
        os._exit(0)
    context_attention(q, k, v, **call)
    torch.cuda.synchronize()


ON_GPUS = "ring-d64", "gather-d128", "ring-documents", "gather-window", "ring-deterministic"
WAYS = ("ring", "zigzag"), ("gather", "stripe"), ("gather", "zigzag"), ("heads", "balanced")


def join(rank, size, file, backend, seconds=60):
    where, limit = f"file://{file}", timedelta(seconds=seconds)
    dist.init_process_group(backend, where, limit, size, rank)


def check_on_cpu(file):
    """Check a group of this process and a fork of it."""
    child = os.fork()
    rank, size = int(child == 0), 2
    join(rank, size, file, "gloo")
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("context",))
    for exchange, layout in WAYS:
        check(mesh["context"], context_plan(96, size, layout), exchange)
    check(dist.group.WORLD, context_plan(96, size, "contiguous"), "ring")
    check_torch_conventions(mesh["context"], rank)
    check_that_all_raise(context_plan(96, size))
    assert rank or os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    rank, size, file, _, *dies = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    torch.cuda.set_device(rank)
    torch.set_default_device(f"cuda:{rank}")
    join(rank, size, file, "nccl", 10 if dies else 60)
    if dies:
        die(rank, size)
    else:
        check_on_gpus(rank, size)
        check_cases(size)
