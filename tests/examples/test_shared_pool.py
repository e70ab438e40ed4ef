import jax
import numpy as np
import torch

from examples import shared_pool
from examples.support import jax_decoding, torch_decoding, toy_model
from torch_attn import flash_attention


def without_a_cache(device: str) -> np.ndarray:
    toy = jax.tree.map(lambda x: torch.tensor(x, device=device), toy_model.make_toy())
    sequences = []
    for b, length in enumerate(toy.seq_lens.tolist()):
        start = toy.prompts.shape[1] - length
        tokens = torch.cat([toy.prompts[b, start:], toy.last_tokens[b : b + 1]])
        for gumbel in toy.noise[:, b]:
            x, q, k, v = torch_decoding.project(toy.weights, tokens[None])
            out = flash_attention(q, k, v, causal=True, implementation="reference")
            x = x[0, -1] + torch.einsum("hd,hdo->o", out[0, -1].float(), toy.weights["out"])
            tokens = torch.cat([tokens, (x @ toy.weights["logits"] + gumbel).argmax()[None]])
        sequences.append(tokens[length + 1 :].cpu().numpy())
    return np.stack(sequences)


def test_both_frameworks_sample_what_attention_without_a_cache_does(implementation, torch_device):
    in_torch, in_jax = shared_pool.decode_in_both(torch_device, implementation)
    expected = without_a_cache(torch_device)
    assert expected.shape == (3, toy_model.NEW_TOKENS)
    np.testing.assert_array_equal(in_torch, expected)
    np.testing.assert_array_equal(in_jax, expected)


def test_jax_reads_the_memory_that_torch_wrote(monkeypatch, torch_device):
    seen = {}

    def prefill(weights, prompts, pool, *arguments):
        seen["torch"] = [x.data_ptr() for x in pool]

    def generate(weights, tokens, pool, *arguments):
        seen["jax"] = [x.unsafe_buffer_pointer() for x in pool]
        return jax.numpy.zeros(())

    monkeypatch.setattr(torch_decoding, "prefill", prefill)
    monkeypatch.setattr(jax_decoding, "generate", generate)
    shared_pool.decode_in_both(torch_device)
    assert seen["jax"] == seen["torch"]
