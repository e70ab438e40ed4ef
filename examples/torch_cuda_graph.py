"""A decoding step of all layers in one launch: `append_kv` and `paged_decode` in a CUDA graph.

``python -m examples.torch_cuda_graph`` gets the same tokens with a graph and without. It needs a
GPU for the graph.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from examples.support import toy_model
from torch_attn import append_kv, paged_decode

LAYERS = 32


class Decoder:
    """A toy model of several layers, with a cache for a batch of sequences.

    A CUDA graph needs tensors that stay in place: the caller writes to `tokens` and `seq_lens`
    before a step.

    Attributes:
        tokens: [B], the newest token of each sequence.
        seq_lens: [B] int32, tokens of each sequence, the newest included; 0 for none.
        block_tables: [B, max_pages] int32, shared by the layers' pools.
        k_pages, v_pages: [layers, P, page_size, heads, head_dim].
        weights: embedding and logits of the toy model; q, k, v and out, a layer in each row.
    """

    def __init__(self, layers: int, device: str) -> None:
        toy = toy_model.make_toy()
        self.tokens = torch.tensor(toy.last_tokens, device=device)
        self.seq_lens = torch.tensor(toy.seq_lens, device=device)
        self.block_tables = torch.tensor(toy.block_tables, device=device)
        # A slot's content does not matter before its token is appended.
        shape = (2, layers, *toy_model.POOL_SHAPE)
        self.k_pages, self.v_pages = torch.empty(shape, dtype=torch.float16, device=device)
        rng = np.random.default_rng(toy_model.SEED)
        made = {name: toy.weights[name] for name in ("embedding", "logits")}
        for name in ("q", "k", "v", "out"):
            made[name] = rng.normal(0, toy_model.HIDDEN**-0.5, (layers, *toy.weights[name].shape))
        self.weights = {name: torch.tensor(x, device=device).float() for name, x in made.items()}

    def step(self) -> Tensor:
        """Append each sequence's newest token; return logits [B, vocabulary]."""
        weights = self.weights
        x = weights["embedding"][self.tokens]
        for layer, (k_pages, v_pages) in enumerate(zip(self.k_pages, self.v_pages, strict=True)):
            q, k, v = project(weights, layer, x)
            cache = k_pages, v_pages, self.block_tables, self.seq_lens
            append_kv(k, v, *cache)
            x = x + merge_heads(weights, layer, paged_decode(q, *cache))
        return rms_norm(x, x.shape[-1:]) @ weights["logits"]


def project(weights: dict[str, Tensor], layer: int, x: Tensor) -> list[Tensor]:
    """Return a layer's q, k and v [..., heads, head_dim] in float16 from x [..., hidden]."""
    x = rms_norm(x, x.shape[-1:])
    return [torch.einsum("...i,ihd->...hd", x, weights[name][layer]).half() for name in "qkv"]


def merge_heads(weights: dict[str, Tensor], layer: int, attended: Tensor) -> Tensor:
    """Return a layer's output [..., hidden] from attention [..., heads, head_dim]."""
    return torch.einsum("...hd,hdo->...o", attended.float(), weights["out"][layer])


def capture(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Capture a step in a CUDA graph; return a function that replays it.

    The step runs once on the current CUDA device, which compiles its kernels. A replay reads and
    writes the same memory, so the step's tensors must stay alive and in place. The next replay
    overwrites the tensor that one returns.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Only this thread may not allocate during the capture; JAX's may.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = step()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def generate(decoder: Decoder, step: Callable[[], Tensor]) -> Tensor:
    """Read the toy's prompts token by token, and continue them; return the tokens [B, NEW_TOKENS].

    The prompts end together: shorter ones have length 0 until they begin. `step` is `decoder.step`
    or a replay of it.
    """
    toy = toy_model.make_toy()
    device = decoder.tokens.device
    prompts = torch.tensor(np.c_[toy.prompts, toy.last_tokens], device=device)
    lengths = torch.tensor(toy.seq_lens, device=device) + 1
    noise = torch.tensor(toy.noise, device=device)
    _, read = prompts.shape
    sampled: list[Tensor] = []
    for t in range(read + len(noise) - 1):
        decoder.tokens.copy_(prompts[:, t] if t < read else sampled[-1])
        decoder.seq_lens.copy_((lengths + (t + 1 - read)).clamp(min=0))
        logits = step()
        if t >= read - 1:
            sampled.append((logits + noise[len(sampled)]).argmax(-1))
    return torch.stack(sampled, dim=1)


def milliseconds(step: Callable[[], Tensor], repeats: int = 20) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) * 1e3 / repeats


def main() -> int:
    print("tokens of each sequence, with a graph and without:", flush=True)
    has_gpu = torch.cuda.is_available()
    decoder = Decoder(LAYERS, "cuda" if has_gpu else "cpu")
    eager = generate(decoder, decoder.step)
    step = capture(decoder.step) if has_gpu else decoder.step
    replayed = generate(decoder, step)
    for tokens in replayed.tolist():
        print(*tokens)
    if has_gpu:
        torch.cuda.synchronize()
        print(f"host: {milliseconds(decoder.step):.2f} ms a step, replayed ", end="")
        torch.cuda.synchronize()
        print(f"{milliseconds(step):.3f} ms")
    else:
        print("no GPU: the step ran without a graph")
    return 0 if torch.equal(eager, replayed) else 1


if __name__ == "__main__":
    sys.exit(main())
