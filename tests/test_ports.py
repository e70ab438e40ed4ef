"""Programs ported as docs/coming-from.md says give the same as before."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_attn


class SelfAttention(nn.Module):
    """Causal attention of [B, T, C] as small GPTs write it; `attend` takes [B, H, T, D]."""

    def __init__(self, width: int, heads: int, attend):
        super().__init__()
        self.heads, self.attend = heads, attend
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        shape = batch, tokens, self.heads, width // self.heads
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        y = self.attend(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))


def gpt(attend, vocabulary: int = 40, width: int = 64) -> nn.Module:
    """Return a GPT of two blocks without MLPs, always with the same weights."""
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.attention = nn.LayerNorm(width), SelfAttention(width, 4, attend)

        def forward(self, x):
            return x + self.attention(self.norm(x))

    return nn.Sequential(
        nn.Embedding(vocabulary, width), Block(), Block(), nn.Linear(width, vocabulary)
    )


def test_training_a_gpt_that_used_sdpa():
    def sdpa(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def ours(q, k, v):  # the row of "torch SDPA" for is_causal
        qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
        return torch_attn.flash_attention(qt, kt, vt, causal=True).transpose(1, 2)

    text = torch.randint(40, (3, 33), generator=torch.Generator().manual_seed(1))
    losses = []
    for attend in (sdpa, ours):
        model = gpt(attend)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        losses.append([])
        for _ in range(3):
            logits = model(text[:, :-1]).flatten(0, 1)
            loss = F.cross_entropy(logits, text[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0][0] > losses[0][2]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def plain(q, keys, values):
    """Attend from the last tokens of a sequence, [T, H, D], in float32."""
    group = q.shape[1] // keys.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (keys, values))
    s = torch.einsum("thd,shd->hts", q.float(), k) / q.shape[-1] ** 0.5
    position = torch.arange(len(keys) - len(q), len(keys))[:, None]
    s = s.masked_fill(torch.arange(len(keys)) > position, -torch.inf)
    return torch.einsum("hts,shd->thd", s.softmax(-1), v)


def test_a_serving_loop_with_slots_and_block_tables():
    torch.manual_seed(0)
    page, heads_q, heads_kv, size = 16, 4, 2, 32
    k_cache, v_cache = torch.zeros(2, 12, page, heads_kv, size, dtype=torch.bfloat16)
    free = list(range(12))
    history: dict[str, list[torch.Tensor]] = {}  # what a request stored, for the plain formula
    tables: dict[str, list[int]] = {}
    steps = [{"a": 20, "b": 5}, {"a": 1, "b": 1, "c": 33}, {"b": 1, "c": 1}, {"c": 1, "d": 17}]
    for step in steps:
        for name in [x for x in tables if x not in step]:  # finished: its pages are free again
            free += tables.pop(name)
            del history[name]
        new = {
            x: [torch.randn(n, h, size).bfloat16() for h in (heads_q, heads_kv, heads_kv)]
            for x, n in step.items()
        }
        for name, (_, k, v) in new.items():
            old = history.get(name)
            history[name] = (
                [k, v] if old is None else [torch.cat(x) for x in zip(old, (k, v), strict=True)]
            )
            table = tables.setdefault(name, [])
            while len(table) * page < len(history[name][0]):
                table.append(free.pop())
        width = max(len(tables[x]) for x in step)
        block_table = torch.tensor(
            [tables[x] + [0] * (width - len(tables[x])) for x in step], dtype=torch.int32
        )
        seq_lens = torch.tensor([len(history[x][0]) for x in step], dtype=torch.int32)
        query_start_loc = torch.tensor([0, *step.values()]).cumsum(0).int()
        q, k, v = (torch.cat(x) for x in zip(*new.values(), strict=True))

        torch_attn.append_kv(
            k, v, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q=query_start_loc
        )
        out = torch_attn.paged_attention(
            q, k_cache, v_cache, block_table, seq_lens, query_start_loc
        )

        expected = torch.cat([plain(new[x][0], *history[x]) for x in step])
        torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    assert len(free) + sum(map(len, tables.values())) == 12


def test_a_flax_model_with_another_attention_function():
    nnx = pytest.importorskip("flax.nnx")
    import jax

    from pallas_attn.adapters.jax_nn import dot_product_attention

    def attention(query, key, value, **options):
        return dot_product_attention(query, key, value, is_causal=True)

    def make(**options):
        return nnx.MultiHeadAttention(
            4, 64, decode=False, deterministic=True, rngs=nnx.Rngs(0), **options
        )

    with jax.default_device(jax.devices("cpu")[0]):
        x = jax.random.normal(jax.random.key(1), (2, 24, 64))
        theirs = make()(x, mask=nnx.make_causal_mask(x[..., 0]))
        ours = make(attention_fn=attention)(x)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
