import numpy as np
import pytest
import torch
from torch.nn.functional import rms_norm
from torch.profiler import ProfilerActivity, profile

from examples.support import toy_model
from examples.torch_cuda_graph import LAYERS, Decoder, capture, generate, merge_heads, project
from torch_attn import flash_attention

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="a CUDA graph is captured on a CUDA device"
)


def without_a_cache(decoder: Decoder, layers: int) -> torch.Tensor:
    toy, weights = toy_model.make_toy(), decoder.weights
    prompts = np.c_[toy.prompts, toy.last_tokens]
    sequences = []
    for b, length in enumerate(toy.seq_lens + 1):
        tokens = torch.tensor(prompts[b, -length:], device=decoder.tokens.device)
        for gumbel in torch.tensor(toy.noise[:, b], device=tokens.device):
            x = weights["embedding"][tokens][None]
            for layer in range(layers):
                out = flash_attention(
                    *project(weights, layer, x), causal=True, implementation="reference"
                )
                x = x + merge_heads(weights, layer, out)
            logits = rms_norm(x[0, -1], x.shape[-1:]) @ weights["logits"]
            tokens = torch.cat([tokens, (logits + gumbel).argmax()[None]])
        sequences.append(tokens[length:])
    return torch.stack(sequences)


def test_sequences_of_different_lengths_continue_as_without_a_cache(torch_device):
    layers = 2  # whose largest sum leads the next by 0.12 or more; of more layers it leads by less
    decoder = Decoder(layers, torch_device)
    tokens = generate(decoder, decoder.step)
    assert tokens.shape == (3, toy_model.NEW_TOKENS)
    assert torch.equal(tokens, without_a_cache(decoder, layers))


@needs_gpu
def test_replays_with_other_lengths_give_what_eager_steps_give():
    eager, replayed = Decoder(LAYERS, "cuda"), Decoder(LAYERS, "cuda")
    step = capture(replayed.step)
    for decoder in (eager, replayed):
        decoder.k_pages.zero_()
        decoder.v_pages.zero_()
    assert torch.equal(generate(eager, eager.step), generate(replayed, step))
    assert torch.equal(eager.step(), step())
    assert torch.equal(eager.k_pages, replayed.k_pages)
    assert torch.equal(eager.v_pages, replayed.v_pages)


def launches(call) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        call()
        torch.cuda.synchronize()
    return [event.name for event in seen.events() if "Launch" in event.name]


@needs_gpu
def test_a_step_over_32_layers_is_one_launch():
    decoder = Decoder(LAYERS, "cuda")
    replay = capture(decoder.step)
    replay()
    assert LAYERS == 32
    assert len(launches(decoder.step)) >= 2 * LAYERS  # an append and a decode of each layer
    (launch,) = launches(replay)
    assert "GraphLaunch" in launch
