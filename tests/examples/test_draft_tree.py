import numpy as np
import pytest

from examples import draft_tree
from examples.support.jax_drafting import JaxDecoder
from examples.support.torch_drafting import TorchDecoder

MARGIN = 0.05  # of the largest logit over the next, which no rounding of keys to float16 bridges


def logits_of(toy, tokens):
    weights = {name: x.astype(float) for name, x in toy.weights.items()}
    half = draft_tree.HEAD_DIM // 2
    angles = np.arange(len(tokens))[:, None, None] * 100.0 ** (-np.arange(half) / half)

    def rotate(x):
        first, second = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    x = weights["embedding"][tokens]
    for layer in range(draft_tree.LAYERS):
        q, k, v = (np.einsum("ti,ihd->thd", x, weights[f"{y}{layer}"]) for y in "qkv")
        group = draft_tree.HEADS_Q // draft_tree.HEADS_KV
        k, v = (np.repeat(y, group, axis=1) for y in (rotate(k), v))
        s = np.einsum("qhd,khd->hqk", rotate(q), k) / draft_tree.HEAD_DIM**0.5
        p = np.where(np.tri(len(tokens)), np.exp(s), 0)
        out = np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v)
        x = x + np.einsum("thd,hdo->to", out, weights[f"out{layer}"])
    return x[-1] @ weights["logits"]


@pytest.fixture(scope="module")
def toy():
    return draft_tree.make_toy()


@pytest.fixture(scope="module")
def expected(toy):
    answers = []
    for prompt in toy.prompts:
        tokens = prompt.tolist()
        for _ in range(draft_tree.NEW_TOKENS):
            logits = logits_of(toy, tokens)
            second, first = np.sort(logits)[-2:]
            assert first - second > MARGIN
            tokens.append(int(logits.argmax()))
        answers.append(tokens[len(prompt) :])
    return np.array(answers)


@pytest.fixture(params=["torch", "jax"])
def decoder(request, toy, implementation, torch_device):
    if request.param == "jax":
        return JaxDecoder(toy, implementation)
    return TorchDecoder(toy, implementation, torch_device)


@pytest.mark.parametrize("parents", [(-1,), draft_tree.PARENTS], ids=["one token", "drafts"])
def test_the_tokens_are_those_of_greedy_decoding(toy, expected, decoder, parents):
    found, steps = draft_tree.decode(toy, decoder, draft_tree.NEW_TOKENS, parents)
    np.testing.assert_array_equal(found, expected)
    most = draft_tree.NEW_TOKENS - 1
    assert steps == most if parents == (-1,) else steps < most


def test_drafts_are_the_likeliest_tokens_without_attention(toy):
    tokens = draft_tree.draft(toy.weights, np.array([5]), draft_tree.PARENTS)[0]
    assert tokens[0] == 5
    for parent in (0, 1, 4):
        children = [t for t, x in enumerate(draft_tree.PARENTS) if x == parent]
        logits = toy.weights["embedding"][tokens[parent]] @ toy.weights["logits"]
        assert tokens[children].tolist() == np.argsort(-logits)[:2].tolist()


def test_a_path_ends_where_the_model_says_something_else():
    tokens = np.array([9, 1, 2, 3, 4, 5, 6])
    for likeliest, path in (
        ([1, 3, 0, 0, 0, 0, 0], [0, 1, 3]),
        ([1, 7, 0, 0, 0, 0, 0], [0, 1]),
        ([4, 3, 0, 0, 6, 0, 0], [0, 4, 6]),
        ([8, 3, 0, 0, 6, 0, 0], [0]),
    ):
        assert draft_tree.accept(tokens, np.array(likeliest), draft_tree.PARENTS) == path
