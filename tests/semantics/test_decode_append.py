import pytest
import torch

from twin_attention.contract.paged_spec import PagedCache
from twin_attention.contract.reference.cache import quantize

PAGE_SIZE, MAX_PAGES, HEADS, DIM, DIM_V = 5, 4, 2, 24, 16
NUM_PAGES = 30
LENGTHS = (7, 2, 21, 20, 0, 6)


def inputs_of(device, kv_dtype=None, dtype=torch.bfloat16, tokens=3, scale_shape=()):
    make = torch.Generator().manual_seed(0)
    new = (len(LENGTHS), HEADS) if tokens is None else (len(LENGTHS), tokens, HEADS)
    inputs = {
        "k_new": 3 * torch.randn(*new, DIM, generator=make),
        "v_new": 3 * torch.randn(*new, DIM_V, generator=make),
    }
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    for name, size in (("k", DIM), ("v", DIM_V)):
        numbers = torch.arange(NUM_PAGES * PAGE_SIZE * HEADS * size) % 101
        pool = numbers.view(NUM_PAGES, PAGE_SIZE, HEADS, size)
        inputs[f"{name}_pages"] = pool.to(kv_dtype or dtype)
        if kv_dtype is not None:
            # Some numbers are too large for the cache.
            inputs[f"{name}_scale"] = 0.02 + 0.03 * torch.rand(scale_shape, generator=make)
            if kv_dtype is torch.float8_e4m3fn:
                inputs[f"{name}_scale"] /= 4
    order = torch.randperm(NUM_PAGES, generator=make)[: len(LENGTHS) * MAX_PAGES]
    inputs["block_tables"] = order.view(len(LENGTHS), MAX_PAGES).int()
    inputs["seq_lens"] = torch.tensor(LENGTHS, dtype=torch.int32)
    return {name: x.to(device) for name, x in inputs.items()}


def expected(inputs):
    tables, lengths = inputs["block_tables"].tolist(), inputs["seq_lens"].tolist()
    pools = []
    for name in ("k", "v"):
        pool, new = inputs[f"{name}_pages"].clone(), inputs[f"{name}_new"]
        new = new[:, None] if new.ndim == 3 else new
        if f"{name}_scale" in inputs:
            kind = str(pool.dtype).removeprefix("torch.")
            cache = PagedCache(NUM_PAGES, PAGE_SIZE, MAX_PAGES, HEADS, DIM, DIM_V, kind)
            new = quantize(new, inputs[f"{name}_scale"], cache, pool.dtype)
        for b, length in enumerate(lengths):
            for t in range(new.shape[1]):
                position = length - new.shape[1] + t
                if not 0 <= position < PAGE_SIZE * MAX_PAGES:
                    continue
                page = tables[b][position // PAGE_SIZE]
                if 0 <= page < NUM_PAGES:
                    pool[page, position % PAGE_SIZE] = new[b, t]
        pools.append(pool)
    return pools


def assert_pools(got, want):
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert torch.equal(a.float(), b.float())


def assert_appends(side, implementation, inputs):
    got = side.call("append_kv", inputs, implementation=implementation)
    assert_pools(got, expected(inputs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [None, 3, 16])
def test_new_tokens_go_to_their_pages(side, implementation, torch_device, dtype, tokens):
    inputs = inputs_of(torch_device, dtype=dtype, tokens=tokens)
    assert_appends(side, implementation, inputs)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("scale_shape", [(), (HEADS,)], ids=["tensor", "heads"])
def test_a_quantised_cache(side, implementation, torch_device, kv_dtype, scale_shape):
    inputs = inputs_of(torch_device, kv_dtype, scale_shape=scale_shape)
    assert_appends(side, implementation, inputs)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_rounding_to_a_quantised_cache(side, implementation, torch_device, kv_dtype):
    """Numbers that the cache holds, the ties between them, and numbers far too large."""
    inputs = inputs_of(torch_device, kv_dtype, dtype=torch.float16, tokens=16)
    if kv_dtype is torch.int8:
        numbers = torch.arange(-130, 131) / 2
    else:
        codes = torch.arange(256, dtype=torch.uint8).view(kv_dtype).float()
        codes = codes[codes.isfinite()].unique()
        numbers = torch.cat([codes, (codes[1:] + codes[:-1]) / 2])
    numbers = torch.cat([numbers, torch.tensor([6e4, -6e4])]).half().to(torch_device)
    for name in ("k", "v"):
        new = inputs[f"{name}_new"]
        turn = torch.arange(new.numel(), device=torch_device) % len(numbers)
        inputs[f"{name}_new"] = numbers[turn].view(new.shape)
        inputs[f"{name}_scale"] = torch.ones((), device=torch_device)
    assert_appends(side, implementation, inputs)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_nan_in_a_quantised_cache(side, implementation, torch_device, kv_dtype):
    """int8 stores 0, float8 NaN."""
    inputs = inputs_of(torch_device, kv_dtype, scale_shape=(HEADS,))
    inputs["k_new"][:, 0, 0, ::3] = torch.nan
    inputs["k_new"][:, 1, 1, :4] = torch.tensor([0.0, 1.0, -1.0, -torch.nan])
    inputs["k_scale"][1] = 0.0
    inputs["v_scale"][0] = torch.nan
    want = expected(inputs)
    got = side.call("append_kv", inputs, implementation=implementation)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)
    page, slot = inputs["block_tables"][0, 0], LENGTHS[0] - 3
    stored = got[0][page, slot, 0, ::3].float()
    assert (stored == 0).all() if kv_dtype is torch.int8 else stored.isnan().all()


def test_what_has_no_place_is_dropped(side, implementation, torch_device):
    inputs = inputs_of(torch_device)
    pools = inputs["k_pages"], inputs["v_pages"]
    lengths = torch.tensor([0, -3, 2**31 - 1, -(2**31), 24, 1000], dtype=torch.int32)
    dropped = inputs | {"seq_lens": lengths.to(torch_device)}
    assert_pools(side.call("append_kv", dropped, implementation=implementation), pools)

    tables = torch.tensor([-1, NUM_PAGES, 2**31 - 1, -(2**31), -7, NUM_PAGES + 1])
    tables = tables.int()[:, None].expand(-1, MAX_PAGES).contiguous()
    dropped = inputs | {"block_tables": tables.to(torch_device)}
    assert_pools(side.call("append_kv", dropped, implementation=implementation), pools)


@pytest.mark.parametrize("sizes", [{"tokens": 0}, {"batch": 0}, {"max_pages": 0}, {"pages": 0}])
def test_nothing_to_write(side, implementation, torch_device, sizes):
    inputs = inputs_of(torch_device, tokens=sizes.get("tokens", 3))
    batch, width = sizes.get("batch", len(LENGTHS)), sizes.get("max_pages", MAX_PAGES)
    for name in ("k_new", "v_new", "block_tables", "seq_lens"):
        inputs[name] = inputs[name][:batch]
    inputs["block_tables"] = inputs["block_tables"][:, :width].contiguous()
    for name in ("k_pages", "v_pages"):
        inputs[name] = inputs[name][: sizes.get("pages", NUM_PAGES)]
    got = side.call("append_kv", inputs, implementation=implementation)
    assert_pools(got, (inputs["k_pages"], inputs["v_pages"]))
