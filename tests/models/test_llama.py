from dataclasses import replace

import pytest
import torch

pytest.importorskip("flax")
pytest.importorskip("transformers")

from bench.training.case import FORM_ATTENTIONS
from models.llama import ATTENTIONS, Llama
from tests.models.pairs import TINY, batch_of, in_float64, make_pair
from twin_attention.contract.tolerances import compare_to_reference

CONFIG = TINY["modern"]
THEIR_NAMES = {
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "attention": "self_attn", "embed": "model.embed_tokens", "layers": "model.layers",
    "norm": "model.norm", "head": "lm_head",
}  # fmt: skip


def llama_of(model, attention, device):
    weights = {
        ".".join(["model", *(THEIR_NAMES.get(part, part) for part in name.split("."))]): weight
        for name, weight in model.state_dict().items()
    }
    llama = Llama(CONFIG, attention, device=device)
    llama.load_state_dict(weights)  # refuses another name and a missing one
    return llama


@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_it_is_the_transformer_with_each_attention(torch_device, attention):
    model, _ = make_pair(CONFIG, ("eager", "xla"), torch_device)
    if attention == "flex" and torch_device == "cpu":
        with pytest.raises(NotImplementedError, match="expected a CUDA device for 'flex', got cpu"):
            llama_of(model, attention, torch_device)
        return
    llama, tokens = llama_of(model, attention, torch_device), batch_of(torch_device)
    ref = in_float64(model)(tokens)
    agreement = compare_to_reference(llama(tokens), ref, model(tokens), "float32", "output")
    assert agreement.ok, agreement
    assert llama.model.config._attn_implementation == ATTENTIONS[attention]


@torch.no_grad()
def test_tokens_over_a_cache_are_those_of_the_whole_text(torch_device):
    model, _ = make_pair(CONFIG, ("eager", "xla"), torch_device)
    llama, tokens = llama_of(model, "twin", torch_device), batch_of(torch_device)
    first, cache = llama.decode(tokens)
    second, cache = llama.decode(first, cache)
    text = torch.cat([tokens, first], dim=1)
    assert torch.equal(torch.cat([first, second], dim=1), model(text).argmax(dim=-1)[:, -2:])
    assert cache.get_seq_length() == text.shape[1]


def test_mixed_precision_computes_in_the_other_dtype(torch_device):
    llama = Llama(CONFIG, device=torch_device, compute_dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in llama.parameters()} == {torch.float32}
    assert llama(batch_of(torch_device)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("attention", "config", "message"),
    [
        ("cudnn", CONFIG, "attention: expected one of twin, eager, sdpa, flex, got 'cudnn'"),
        ("twin", TINY["gpt"], "config: expected rmsnorm and swiglu, got layernorm and gelu"),
        ("twin", replace(CONFIG, mlp="gelu"), "expected rmsnorm and swiglu, got rmsnorm and gelu"),
    ],
)
def test_what_it_cannot_be_is_refused(attention, config, message):
    with pytest.raises(ValueError, match=message):
        Llama(config, attention)


def test_the_benchmark_has_every_attention():
    assert FORM_ATTENTIONS["llama"] == tuple(ATTENTIONS)
