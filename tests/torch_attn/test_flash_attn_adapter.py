"""flash-attn's signatures: each argument does what flash-attn says, or is refused."""

import inspect
import re

import pytest
import torch

from torch_attn import append_kv, flash_attention, paged_decode
from torch_attn.adapters.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    pad_input,
    unpad_input,
)
from twin_attention.contract.reference.rotary import rotate


def draw(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


QKV = (draw(2, 5, 4, 16), draw(2, 7, 2, 16), draw(2, 7, 2, 24))
LENGTHS = torch.tensor([4, 9], dtype=torch.int32)


def test_the_signatures_are_those_of_flash_attn():
    # flash-attn 2.8's order
    names = "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic"
    expected = [*names.split(), "return_attn_probs"]
    assert list(inspect.signature(flash_attn_func).parameters) == expected
    names = "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx"
    names += " cache_leftpad block_table softmax_scale causal window_size softcap"
    names += " rotary_interleaved alibi_slopes num_splits return_softmax_lse"
    assert list(inspect.signature(flash_attn_with_kvcache).parameters) == names.split()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"causal": True, "deterministic": True}, {"causal": True, "deterministic": True}),
        ({"softmax_scale": 0.3, "softcap": 2.0}, {"scale": 0.3, "softcap": 2.0}),
        ({"window_size": (2, -1)}, {"window_size": (2, None)}),
        ({"window_size": (-1, 0)}, {"causal": True}),
        ({"window_size": (0, 3)}, {"window_size": (0, 3)}),
        ({"alibi_slopes": torch.ones(4)}, {"alibi_slopes": torch.ones(4)}),
    ],
)
def test_options_of_flash_attn_func(theirs, ours):
    assert torch.equal(flash_attn_func(*QKV, **theirs), flash_attention(*QKV, **ours))


def test_flash_attn_func_takes_options_by_position():
    got = flash_attn_func(*QKV, 0.0, 0.3, True, (2, -1), 2.0)
    options = {"scale": 0.3, "causal": True, "window_size": (2, None), "softcap": 2.0}
    assert torch.equal(got, flash_attention(*QKV, **options))


def test_flash_attn_func_draws_a_seed_of_torch():
    torch.manual_seed(3)
    seed = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32)
    want = flash_attention(*QKV, dropout_rate=0.3, dropout_seed=seed)
    torch.manual_seed(3)
    assert torch.equal(flash_attn_func(*QKV, 0.3), want)
    assert not torch.equal(flash_attn_func(*QKV, 0.3), want)


def test_flash_attn_func_has_gradients():
    q, k, v = (x.float().requires_grad_() for x in QKV)
    got = torch.autograd.grad(flash_attn_func(q, k, v, causal=True).sum(), (q, k, v))
    want = torch.autograd.grad(flash_attention(q, k, v, causal=True).sum(), (q, k, v))
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        # flash-attn 3 has softmax_scale in this place
        ({"dropout_p": None}, TypeError, "dropout_rate: expected a number"),
        (
            {"alibi_slopes": torch.ones(4), "softcap": 3.0},
            NotImplementedError,
            "softcap: expected 0.0 with alibi_slopes, got 3.0",
        ),
        ({"return_attn_probs": True}, NotImplementedError, "return_attn_probs: expected False"),
        ({"window_size": (-2, 0)}, ValueError, "window_size: expected None or a tuple"),
        ({"window_size": 4}, TypeError, "window_size: expected a pair (left, right), -1 for no li"),
        ({"softcap": -1.0}, ValueError, "softcap: expected a positive number"),
    ],
)
def test_flash_attn_func_refuses(options, error, message):
    with pytest.raises(error) as caught:
        flash_attn_func(*QKV, **options)
    assert str(caught.value).startswith(message)


def cached(table: bool) -> tuple[dict, dict]:
    k, v = draw(2, 12, 2, 16), draw(2, 12, 2, 24)
    pages = {"k_pages": k.view(6, 4, 2, 16), "v_pages": v.view(6, 4, 2, 24)}
    if table:
        tables = torch.tensor([[5, 0, 2], [3, 1, 4]], dtype=torch.int32)
        return {"k_cache": pages["k_pages"], "v_cache": pages["v_pages"], "block_table": tables}, (
            pages | {"block_tables": tables}
        )
    tables = torch.arange(6, dtype=torch.int32).view(2, 3)
    return {"k_cache": k, "v_cache": v}, pages | {"block_tables": tables}


def copied(arguments: dict) -> dict:
    return {name: x.clone() for name, x in arguments.items()}


def assert_equal(got: torch.Tensor, want: torch.Tensor) -> None:
    # Pages of another size are summed in another order.
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("table", [False, True], ids=["dense", "paged"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("new", [None, 1, 3])
def test_decode(table: bool, tokens: int, new: int | None):
    theirs, ours = map(copied, cached(table))
    q = draw(2, tokens, 4, 16)
    lengths = LENGTHS
    options = {"causal": True, "window_size": (5, 0), "softcap": 2.0, "softmax_scale": 0.3}
    if new is not None:
        k, v = draw(2, new, 2, 16), draw(2, new, 2, 24)
        theirs |= {"k": k, "v": v}
        lengths = LENGTHS + new
        append_kv(k, v, *ours.values(), lengths)
    got, got_lse = flash_attn_with_kvcache(
        q, **theirs, cache_seqlens=LENGTHS, return_softmax_lse=True, num_splits=2, **options
    )
    want, want_lse = paged_decode(
        q, *ours.values(), lengths, return_lse=True, num_splits=2,
        window_size=(5, None), softcap=2.0, scale=0.3,
    )  # fmt: skip
    assert_equal(got, want)
    assert_equal(got_lse, want_lse)
    assert torch.equal(theirs["k_cache"].flatten(0, 1), ours["k_pages"].flatten(0, 1))
    assert torch.equal(theirs["v_cache"].flatten(0, 1), ours["v_pages"].flatten(0, 1))


def test_decode_with_slopes():
    theirs, ours = cached(False)
    q, slopes = draw(2, 3, 4, 16), draw(2, 4, dtype=torch.float32).abs()
    options = {"cache_seqlens": LENGTHS, "causal": True, "alibi_slopes": slopes}
    got = flash_attn_with_kvcache(q, **theirs, **options)
    assert_equal(got, paged_decode(q, *ours.values(), LENGTHS, alibi_slopes=slopes))


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("interleaved", [False, True])
def test_decode_with_rotation(tokens: int, interleaved: bool):
    """As in float64 at the positions before the call, rounded to float16."""
    theirs, ours = map(copied, cached(True))
    q, k, v = draw(2, tokens, 4, 16), draw(2, tokens, 2, 16), draw(2, tokens, 2, 24)
    angles = draw(12, 6, dtype=torch.float32)
    rotation = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    got = flash_attn_with_kvcache(
        q, **theirs, k=k, v=v, cache_seqlens=LENGTHS, causal=True, **rotation,
        rotary_interleaved=interleaved,
    )  # fmt: skip
    position = LENGTHS[:, None] + torch.arange(tokens)
    q, k = (
        rotate(x, position, *rotation.values(), interleaved, torch.float64).half() for x in (q, k)
    )
    append_kv(k, v, *ours.values(), LENGTHS + tokens)
    assert_equal(theirs["k_cache"], ours["k_pages"])
    assert_equal(got, paged_decode(q, *ours.values(), LENGTHS + tokens))


def test_lengths_as_a_number_or_absent():
    theirs, ours = cached(False)
    q = draw(2, 1, 4, 16)
    full = torch.full((2,), 12, dtype=torch.int32)
    assert_equal(flash_attn_with_kvcache(q, **theirs), paged_decode(q, *ours.values(), full))
    five = torch.full((2,), 5, dtype=torch.int32)
    got = flash_attn_with_kvcache(q, **theirs, cache_seqlens=5)
    assert_equal(got, paged_decode(q, *ours.values(), five))
    theirs, ours = cached(True)
    assert_equal(flash_attn_with_kvcache(q, **theirs), paged_decode(q, *ours.values(), full))


@pytest.mark.parametrize("length", [512, 300, 257, 1, 0])
def test_dense_caches_of_any_length(length: int):
    k_cache, v_cache = draw(2, length, 2, 16), draw(2, length, 2, 16)
    q = draw(2, 1, 4, 16)
    got = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=length)
    assert_equal(got, flash_attention(q, k_cache, v_cache))


@pytest.mark.parametrize(
    ("batch", "slots"),
    [
        (1, slice(9)), (2, slice(None, None, 3)), (3, slice(700)), (3, slice(131)),
        (3, slice(30, 777)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("heads_first", [False, True])
def test_a_part_of_a_longer_cache(batch: int, slots: slice, heads_first: bool):
    k, v = draw(batch, 777, 2, 16), draw(batch, 777, 2, 24)
    if heads_first:
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    k_cache, v_cache = k[:, slots], v[:, slots]
    q = draw(batch, 1, 4, 16)
    assert_equal(flash_attn_with_kvcache(q, k_cache, v_cache), flash_attention(q, k_cache, v_cache))


def test_slots_past_a_part_of_a_cache_are_not_read():
    k_cache, v_cache = draw(2, 256, 2, 16), draw(2, 256, 2, 24)
    k_cache[:, 100:] = v_cache[:, 100:] = torch.nan
    q, part = draw(2, 1, 4, 16), (k_cache[:, :100], v_cache[:, :100])
    assert_equal(flash_attn_with_kvcache(q, *part), flash_attention(q, *part))


@pytest.mark.parametrize("new", [None, 2])
@pytest.mark.parametrize("padded", [False, True])
def test_chosen_sequences_that_begin_at_their_own_slots(new: int | None, padded: bool):
    """As flash-attn: lengths and rotated positions are slots, with what lies before `begins`."""
    caches = draw(4, 48, 2, 16)[:, :40].clone(), draw(4, 48, 2, 16)[:, 4:44].clone()
    mine = [x.clone() for x in caches]
    rows = torch.tensor([3, 1], dtype=torch.int32)
    begins = torch.tensor([5, 0], dtype=torch.int32)
    lengths, q, named = torch.tensor([30, 38], dtype=torch.int32), draw(2, 2, 4, 16), {}
    if new is not None:
        angles = draw(40, 8, dtype=torch.float32)
        rotation = angles.cos(), angles.sin()
        k, v = draw(2, 2, 2, 16), draw(2, 2, 2, 16).flip(1)
        named = {"k": k, "v": v, "rotary_cos": rotation[0], "rotary_sin": rotation[1]}
    if padded:
        named["cache_leftpad"] = begins
    window = {"window_size": (12, 0), "causal": True}
    got, got_lse = flash_attn_with_kvcache(
        q, *caches, **named, cache_seqlens=lengths, cache_batch_idx=rows, return_softmax_lse=True,
        **window,
    )  # fmt: skip
    if new is not None:
        places = lengths[:, None] + torch.arange(2)
        q, k = (rotate(x, places, *rotation, True, torch.float64).half() for x in (q, k))
        for mine_of, x in zip(mine, (k, v), strict=True):
            mine_of[rows[:, None].long(), places.long()] = x
        lengths = lengths + 2
    for b, row in enumerate(rows):
        begin = int(begins[b]) if padded else 0
        keys, values = (x[None, row, begin : lengths[b]] for x in mine)
        want, want_lse = flash_attention(q[b : b + 1], keys, values, return_lse=True, **window)
        assert_equal(got[b : b + 1], want)
        assert_equal(got_lse[b : b + 1], want_lse)
    for cache, mine_of in zip(caches, mine, strict=True):
        torch.testing.assert_close(cache, mine_of)


def test_a_dense_cache_compiles():
    k_cache, v_cache = draw(4, 64, 2, 16)[:, :48], draw(4, 64, 2, 16)[:, :48]
    q, rows = draw(2, 1, 4, 16), torch.tensor([3, 1], dtype=torch.int32)
    options = {"cache_batch_idx": rows, "cache_leftpad": rows, "cache_seqlens": rows + 30}
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    got = compiled(q, k_cache, v_cache, **options)
    assert_equal(got, flash_attn_with_kvcache(q, k_cache, v_cache, **options))


def test_packed_tensors():
    qkv = draw(2, 5, 3, 4, 16).float().requires_grad_()
    options = 0.0, 0.3, True, (2, -1)
    got = flash_attn_qkvpacked_func(qkv, *options)
    want = flash_attn_func(*qkv.unbind(2), *options)
    assert torch.equal(got, want)
    gradients = (torch.autograd.grad(x.sum(), qkv)[0] for x in (got, want))
    assert torch.equal(*gradients)
    q, kv = QKV[0], draw(2, 7, 2, 2, 16)
    got = flash_attn_kvpacked_func(q, kv, causal=True)
    assert torch.equal(got, flash_attn_func(q, *kv.unbind(2), causal=True))
    tokens, offsets = draw(10, 3, 4, 16), torch.tensor([0, 4, 10], dtype=torch.int32)
    want = flash_attn_varlen_func(*tokens.unbind(1), offsets, offsets, 6, 6, causal=True)
    assert torch.equal(flash_attn_varlen_qkvpacked_func(tokens, offsets, 6, causal=True), want)
    lengths = offsets, offsets, 6, 6
    q, kv = tokens[:, 0], tokens[:, 1:]
    assert torch.equal(flash_attn_varlen_kvpacked_func(q, kv, *lengths, causal=True), want)
    for function, wrong in (
        (lambda x: flash_attn_qkvpacked_func(x), "qkv: expected 5 dimensions [..., 3, H, D]"),
        (lambda x: flash_attn_kvpacked_func(q, x), "kv: expected 5 dimensions [..., 2, H, D]"),
    ):
        with pytest.raises(ValueError, match=re.escape(wrong)):
            function(draw(2, 5, 4, 4, 16))


def test_padding():
    x = draw(3, 6, 2, 16).float().requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    tokens, places, offsets, longest, used = unpad_input(x, mask)
    assert torch.equal(tokens, x[mask.bool()])
    assert torch.equal(places, mask.flatten().nonzero()[:, 0])
    assert (offsets.tolist(), longest, used.tolist()) == ([0, 3, 7, 7], 4, [3, 4, 0])
    assert offsets.dtype == used.dtype == torch.int32
    padded = pad_input(tokens, places, 3, 6)
    assert torch.equal(padded, x * mask[:, :, None, None])
    (gradient,) = torch.autograd.grad(padded.square().sum(), x)
    assert torch.equal(gradient, 2 * padded)
    unused = torch.tensor([[0, 0, 0, 1, 0, 0], [0] * 6, [0] * 6])
    _, places, offsets, longest, used = unpad_input(x, mask.bool(), unused)
    assert torch.equal(places, (mask + unused).flatten().nonzero()[:, 0])
    assert (offsets.tolist(), longest, used.tolist()) == ([0, 4, 8, 8], 4, [3, 4, 0])


def test_caches_of_one_slot_may_have_any_stride():
    k_cache, v_cache = (draw(1, 2, 2, 16).transpose(0, 1) for _ in "kv")
    q = draw(2, 1, 4, 16)
    assert_equal(flash_attn_with_kvcache(q, k_cache, v_cache), flash_attention(q, k_cache, v_cache))


def test_several_tokens_under_a_window_that_ends_at_the_token_are_causal():
    theirs, _ = cached(False)
    q = draw(2, 3, 4, 16)
    a = flash_attn_with_kvcache(q, **theirs, cache_seqlens=LENGTHS, window_size=(4, 0))
    b = flash_attn_with_kvcache(
        q, **theirs, cache_seqlens=LENGTHS, window_size=(4, -1), causal=True
    )
    assert torch.equal(a, b)


ROTATION = torch.ones(12, 8)
INDEX = torch.zeros(2, dtype=torch.int32)
NEW = draw(2, 1, 2, 16)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rotary_cos": ROTATION}, ValueError, "k: expected new keys with rotary_cos and rotary"),
        (
            {"rotary_sin": ROTATION, "k": NEW, "v": draw(2, 1, 2, 24), "cache_seqlens": 3},
            ValueError, "rotary_cos: expected both rotary_cos and rotary_sin, or neither",
        ),
        (
            {"rotary_sin": ROTATION, "k": draw(2, 2, 2, 16), "v": NEW, "cache_seqlens": 3},
            NotImplementedError, "k: expected q's 1 new tokens with rotary_cos",
        ),
        (
            {"cache_batch_idx": INDEX, "block_table": INDEX[:, None]},
            NotImplementedError, "cache_batch_idx: expected None with block_table, got Tensor",
        ),
        (
            {"cache_leftpad": INDEX, "block_table": INDEX[:, None]},
            NotImplementedError, "cache_leftpad: expected None with block_table, got Tensor",
        ),
        ({"cache_batch_idx": INDEX.long()}, ValueError, "cache_batch_idx: expected [2] int32, got"),
        ({"cache_seqlens": INDEX.long()}, ValueError, "cache_seqlens: expected [2] int32, got (2,"),
        ({"cache_seqlens": [3, 4]}, TypeError, "cache_seqlens: expected a torch.Tensor, got list"),
        ({"v_cache": None}, TypeError, "v_cache: expected a torch.Tensor, got NoneType"),
        ({"cache_leftpad": INDEX[:1]}, ValueError, "cache_leftpad: expected [2] int32, got (1,)"),
        (
            {"alibi_slopes": torch.ones(4), "softcap": 3.0},
            NotImplementedError, "softcap: expected 0.0 with alibi_slopes, got 3.0",
        ),
        ({"k": NEW}, ValueError, "v: expected k and v, or neither, got only one of them"),
        ({"k": NEW, "v": NEW}, ValueError, "cache_seqlens: expected the length of the cache"),
        (
            {"k": NEW[:, 0], "v": NEW[:, 0], "cache_seqlens": 3},
            ValueError, "k: expected 4 dimensions [B, T_new, Hkv, D], got shape (2, 2, 16)",
        ),
        ({"q": draw(2, 4, 16)}, ValueError, "q: expected 4 dimensions [B, T, Hq, D], got shape"),
        (
            {"q": draw(2, 3, 4, 16)},
            NotImplementedError, "causal: expected True for 3 new tokens, got False",
        ),
        ({"q": draw(2, 65, 4, 16), "causal": True}, NotImplementedError, "q: expected at most 64"),
        ({"q": draw(3, 1, 4, 16)}, ValueError, "k_cache: expected 3 sequences without block_table"),
        ({"k_cache": draw(2, 24, 2, 16)[:, :12]}, ValueError, "v_cache: expected sequences that"),
        (
            {"k_cache": draw(12, 2, 2, 16).transpose(0, 1)},
            ValueError, "k_cache: expected sequences that begin a whole number of tokens apart",
        ),
        ({"k_cache": draw(2, 10, 2, 16)}, ValueError, "v_cache: expected [B, S, Hkv, D] without"),
        ({"num_splits": 257}, ValueError, "num_splits: expected None or an integer"),
        ({"window_size": (-2, 0)}, ValueError, "window_size: expected None or a tuple"),
    ],
)  # fmt: skip
def test_flash_attn_with_kvcache_refuses(options, error, message):
    theirs, _ = cached(False)
    with pytest.raises(error) as caught:
        flash_attn_with_kvcache(**{"q": draw(2, 1, 4, 16)} | theirs | options)
    assert str(caught.value).startswith(message)
