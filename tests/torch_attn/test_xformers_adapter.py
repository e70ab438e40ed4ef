"""xformers' `memory_efficient_attention`: each mask means what it means there, or is refused.

Stand-ins have the names and the attributes of xformers' masks.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch

from torch_attn import flash_attention
from torch_attn.adapters import xformers
from torch_attn.adapters.xformers import MASKS, memory_efficient_attention


def draw(*shape: int) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return x.requires_grad_()


def make(name: str, **attributes):
    return type(name, (SimpleNamespace,), {})(**attributes)


def blocks(name: str, q: list[int], k: list[int], **attributes):
    infos = (
        SimpleNamespace(seqstart=torch.tensor(x, dtype=torch.int32), seqstart_py=x)
        for x in ([*itertools.accumulate(lengths, initial=0)] for lengths in (q, k))
    )
    return make(name, **dict(zip(("q_seqinfo", "k_seqinfo"), infos, strict=True)), **attributes)


def seen(seq_q, seq_kv, shift=None, left=None, right=None) -> torch.Tensor:
    """Return the pairs j <= i + shift within a window; without a shift all of them."""
    distance = torch.arange(seq_kv) - torch.arange(seq_q)[:, None] - (shift or 0)
    is_seen = distance <= 0 if shift is not None and right is None else distance == distance
    is_seen = is_seen if right is None else is_seen & (distance <= right)
    return is_seen if left is None else is_seen & (distance >= -left)


def plain(q, k, v, is_seen, bias=0.0):
    s = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5 + bias
    s = s.masked_fill(~is_seen, -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v)


def assert_as_plain(mask, is_seen, seq_q, seq_kv, bias=0.0, batch=2):
    qkv = draw(batch, seq_q, 4, 16), draw(batch, seq_kv, 4, 16), draw(batch, seq_kv, 4, 24)
    out, wanted = memory_efficient_attention(*qkv, mask), plain(*qkv, is_seen, bias)
    torch.testing.assert_close(out, wanted)
    gradients = torch.autograd.grad(out.sum(), qkv)
    torch.testing.assert_close(gradients, torch.autograd.grad(wanted.sum(), qkv))


@pytest.mark.parametrize(("seq_q", "seq_kv"), [(7, 7), (5, 9), (9, 5)])
def test_masks(seq_q, seq_kv):
    shift, pairs = seq_kv - seq_q, (seq_q, seq_kv)
    assert_as_plain(None, seen(*pairs), *pairs)
    assert_as_plain(make("LowerTriangularMask"), seen(*pairs, 0), *pairs)
    bias = draw(1, 4, *pairs)
    mask = make("LowerTriangularMaskWithTensorBias", _bias=bias.expand(2, 4, *pairs))
    assert_as_plain(mask, seen(*pairs, 0), *pairs, bias)
    assert_as_plain(bias.detach(), seen(*pairs), *pairs, bias.detach())
    if shift >= 0:  # there and here, rows that see no key differ
        mask = make("LowerTriangularFromBottomRightMask")
        assert_as_plain(mask, seen(*pairs, shift), *pairs)
        mask = make("LowerTriangularFromBottomRightLocalAttentionMask", _window_size=3)
        assert_as_plain(mask, seen(*pairs, shift, 2), *pairs)
        mask = make("LocalAttentionFromBottomRightMask", window_left=2, window_right=1)
        assert_as_plain(mask, seen(*pairs, shift, 2, 1), *pairs)


@pytest.mark.parametrize(
    ("name", "lengths", "options"),
    [
        ("BlockDiagonalMask", (6, 2), {}),
        ("BlockDiagonalCausalMask", (5, 2), {"shift": 0}),
        ("BlockDiagonalCausalLocalAttentionMask", (5, 2), {"shift": 0, "left": 2}),
        ("BlockDiagonalCausalFromBottomRightMask", (6, 4), {"shift": [1, 2]}),
        (
            "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
            (6, 4), {"shift": [1, 2], "left": 2},
        ),
    ],
)  # fmt: skip
def test_blocks(name, lengths, options):
    q_lengths, (total_q, total_kv) = (5, 2), (7, sum(lengths))
    attributes = {"_window_size": options["left"] + 1} if "left" in options else {}
    mask = blocks(name, [*q_lengths], [*lengths], **attributes)
    parts = []
    for n, pair in enumerate(zip(q_lengths, lengths, strict=True)):
        one = {key: x[n] if isinstance(x, list) else x for key, x in options.items()}
        parts.append(seen(*pair, **one))
    assert_as_plain(mask, torch.block_diag(*parts).bool(), total_q, total_kv, batch=1)


@pytest.fixture
def shapes(monkeypatch) -> list[dict]:
    """Record the shapes of k and of a bias that `flash_attention` gets."""
    found = []

    def attend(q, k, v, bias=None, **options):
        found.append({"k": k.shape, "bias": None if bias is None else bias.shape})
        return flash_attention(q, k, v, bias=bias, **options)

    monkeypatch.setattr(xformers, "flash_attention", attend)
    return found


def test_other_ranks(shapes):
    q, k, v = draw(2, 5, 16), draw(2, 7, 16), draw(2, 7, 24)
    one_head = [x.unsqueeze(2) for x in (q, k, v)]
    bias = draw(2, 5, 7).detach()
    out = memory_efficient_attention(q, k, v, bias)
    torch.testing.assert_close(out, plain(*one_head, seen(5, 7), bias[:, None]).squeeze(2))
    q, kv = draw(2, 5, 2, 3, 16), draw(2, 7, 2, 1, 16)
    out = memory_efficient_attention(q, *[kv.expand(2, 7, 2, 3, 16)] * 2)
    assert shapes[-1]["k"] == (2, 7, 2, 16)
    wanted = flash_attention(q.flatten(2, 3), *[kv.flatten(2, 3)] * 2).view(q.shape)
    torch.testing.assert_close(out, wanted)
    gradients = (torch.autograd.grad(x.sum(), (q, kv)) for x in (out, wanted))
    torch.testing.assert_close(*gradients)
    own = draw(2, 7, 2, 3, 16)
    wanted = flash_attention(*(x.flatten(2, 3) for x in (q, own, own))).view(q.shape)
    torch.testing.assert_close(memory_efficient_attention(q, own, own), wanted)


def test_an_expanded_bias_is_passed_unexpanded(shapes):
    q, bias = draw(2, 5, 4, 16), draw(1, 1, 5, 5)
    out = memory_efficient_attention(q, q, q, bias.expand(2, 4, 5, 5), scale=0.3)
    assert shapes[-1]["bias"] == (1, 1, 5, 5)
    wanted = flash_attention(q, q, q, bias=bias, scale=0.3)
    assert torch.equal(out, wanted)
    gradients = (torch.autograd.grad(x.square().sum(), (q, bias)) for x in (out, wanted))
    torch.testing.assert_close(*gradients)


def test_dropout_draws_from_torch():
    q = draw(2, 5, 4, 16)
    torch.manual_seed(3)
    seed = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32)
    torch.manual_seed(3)
    out = memory_efficient_attention(q, q, q, p=0.3)
    assert torch.equal(out, flash_attention(q, q, q, dropout_rate=0.3, dropout_seed=seed))


X = torch.randn(1, 6, 4, 16)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"op": object}, NotImplementedError, "op: expected None"),
        ({"output_dtype": torch.float16}, NotImplementedError, "output_dtype: expected None or"),
        ({"query": [1.0]}, TypeError, "query: expected a torch.Tensor, got list"),
        ({"key": X[0]}, ValueError, "key: expected [B, M, H, K], [B, M, K] or"),
        (
            {"attn_bias": make("BlockDiagonalPaddedKeysMask")},
            NotImplementedError, f"attn_bias: expected None, a tensor, or one of {MASKS[0]}",
        ),
        (
            {"attn_bias": blocks("BlockDiagonalCausalMask", [2, 4], [3, 3])},
            NotImplementedError, "attn_bias: expected blocks with as many keys as queries",
        ),
        (
            {"attn_bias": blocks("BlockDiagonalMask", [6], [6]), "query": X.expand(2, -1, -1, -1)},
            ValueError, "query: expected a batch of 1 with blocks, got 2",
        ),
        (
            dict.fromkeys(("query", "key", "value"), X[:, :, None]) | {"attn_bias": X},
            NotImplementedError, "attn_bias: expected no tensor with groups of heads",
        ),
        ({"attn_bias": torch.ones(1, 1, 6, 6).bool()}, TypeError, "bias: expected"),
    ],
)  # fmt: skip
def test_refused_by_name(options, error, message):
    with pytest.raises(error) as caught:
        memory_efficient_attention(**{"query": X, "key": X, "value": X} | options)
    assert str(caught.value).startswith(message)
