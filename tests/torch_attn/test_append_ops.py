import torch

from tests.torch_attn.operators import check_operator
from torch_attn import append_kv
from twin_attention.contract.operands import AppendOperands
from twin_attention.interop.parity.cases import AppendCase
from twin_attention.interop.parity.inputs import make_inputs

DENSE = AppendCase(
    "ops", lengths=(7, 12), tokens=3, heads_q=4, head_dim=16, page_size=5, max_pages=3,
    rotary_dim=16, positions=16,
)  # fmt: skip
PACKED = AppendCase(**vars(DENSE) | {"tokens": 0, "new_tokens": (3, 1), "padding": 1})


def inputs_of(case, device):
    """Padding is a number, since opcheck compares what it writes."""
    return {name: torch.nan_to_num(x) for name, x in make_inputs(case, device).items()}


def appended(inputs, **options):
    pools = {name: inputs[name].clone() for name in ("k_pages", "v_pages")}
    return append_kv(**inputs | pools, **options)


def assert_equal(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_opcheck(torch_device):
    operands = AppendOperands(**inputs_of(PACKED, torch_device))
    check_operator(torch.ops.twin_attention.append_kv.default, *operands, True)


def test_compile(torch_device):
    torch._dynamo.reset()
    compiled = torch.compile(appended, fullgraph=True, backend="aot_eager", dynamic=True)
    for case in (DENSE, PACKED):
        inputs = inputs_of(case, torch_device)
        assert_equal(compiled(inputs), appended(inputs))


def test_queries_of_one_token_keep_their_shape(torch_device):
    inputs = inputs_of(AppendCase(**vars(DENSE) | {"tokens": 1}), torch_device)
    flat = inputs | {name: inputs[name][:, 0] for name in ("k_new", "v_new", "q")}
    q, *_ = appended(flat)
    assert q.is_contiguous()
    assert_equal(q, appended(inputs)[0][:, 0])


def test_any_strides(torch_device):
    """q, k and v are views of one projection, cos and sin halves of one table."""
    inputs = inputs_of(DENSE, torch_device)
    want = appended(inputs, implementation="triton")
    packed = torch.cat([inputs[name] for name in ("q", "k_new", "v_new")], dim=2)
    views = dict(zip(("q", "k_new", "v_new"), packed.split((4, 2, 2), dim=2), strict=True))
    table = torch.cat([inputs["rotary_cos"], inputs["rotary_sin"]], dim=1)
    views |= dict(zip(("rotary_cos", "rotary_sin"), table.chunk(2, dim=1), strict=True))
    assert_equal(appended(inputs | views, implementation="triton"), want)


def test_autocast_casts_queries_as_well(torch_device):
    inputs = inputs_of(DENSE, torch_device)
    wide = inputs | {name: inputs[name].float() for name in ("k_new", "v_new", "q")}
    with torch.autocast(torch_device, torch.bfloat16):
        assert_equal(appended(wide), appended(inputs))
