"""Compare transformers' models on `torch_attn` with their own eager attention.

``python -m tests.torch_attn.transformers_models`` writes the table of docs/hugging-face.md. Models
are tiny, with random weights; nothing is downloaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from torch import Tensor

from torch_attn.adapters.transformers import register

SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None, "max_position_embeddings": 64,
    "initializer_range": 0.2,
}  # fmt: skip
WINDOW, IMAGE = 5, 63
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {
    "num_experts": 2, "num_local_experts": 2, "n_routed_experts": 2, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "head_dim": 64, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
WITHOUT_GROUPS = {"num_key_value_heads": 4}
VISION = {"image_size": 16, "patch_size": 4, "num_channels": 3}


class Model(NamedTuple):
    """A row of the table: a class of transformers, its kind, and its config besides `SMALL`."""

    name: str
    kind: str
    classes: str  # of the config and the model, without "Config"
    config: dict[str, Any] = {}  # noqa: RUF012


MODELS = [
    Model("Llama", "decoder", "Llama LlamaForCausalLM"),
    Model("Mistral", "decoder", "Mistral MistralForCausalLM", {"sliding_window": WINDOW}),
    Model("Mixtral", "decoder", "Mixtral MixtralForCausalLM", {"sliding_window": None, **EXPERTS}),
    Model("Gemma", "decoder", "Gemma GemmaForCausalLM"),
    Model("Gemma 2", "decoder", "Gemma2 Gemma2ForCausalLM",
          ALTERNATING | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}),
    Model("Gemma 3", "decoder", "Gemma3Text Gemma3ForCausalLM",
          ALTERNATING | {"query_pre_attn_scalar": 16}),
    Model("Gemma 4", "decoder", "Gemma4Text Gemma4ForCausalLM", ALTERNATING | {
        "head_dim": 256, "global_head_dim": 512, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 0}),
    Model("Qwen 2", "decoder", "Qwen2 Qwen2ForCausalLM"),
    Model("Qwen 3", "decoder", "Qwen3 Qwen3ForCausalLM"),
    Model("Qwen 3 MoE", "decoder", "Qwen3Moe Qwen3MoeForCausalLM", EXPERTS),
    Model("Qwen 3 Next", "decoder", "Qwen3Next Qwen3NextForCausalLM", EXPERTS | {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "shared_expert_intermediate_size": 32}),
    Model("gpt-oss", "decoder", "GptOss GptOssForCausalLM", ALTERNATING | EXPERTS),
    Model("Phi-3", "decoder", "Phi3 Phi3ForCausalLM", {"sliding_window": WINDOW}),
    Model("Cohere 2", "decoder", "Cohere2 Cohere2ForCausalLM", ALTERNATING),
    Model("OLMo 2", "decoder", "Olmo2 Olmo2ForCausalLM"),
    Model("Granite", "decoder", "Granite GraniteForCausalLM"),
    Model("SmolLM 3", "decoder", "SmolLM3 SmolLM3ForCausalLM"),
    Model("StarCoder 2", "decoder", "Starcoder2 Starcoder2ForCausalLM", {"sliding_window": WINDOW}),
    Model("StableLM", "decoder", "StableLm StableLmForCausalLM"),
    Model("GLM-4", "decoder", "Glm4 Glm4ForCausalLM"),
    Model("DeepSeek V2", "decoder", "DeepseekV2 DeepseekV2ForCausalLM", EXPERTS | LATENT),
    Model("DeepSeek V3", "decoder", "DeepseekV3 DeepseekV3ForCausalLM", EXPERTS | LATENT),
    Model("Llama 4", "decoder", "Llama4Text Llama4ForCausalLM", EXPERTS | {
        "attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"],
        "intermediate_size_mlp": 32}),
    Model("GPT-NeoX", "decoder", "GPTNeoX GPTNeoXForCausalLM", WITHOUT_GROUPS),
    Model("GPT-2", "decoder", "GPT2 GPT2LMHeadModel", WITHOUT_GROUPS),
    Model("OPT", "decoder", "OPT OPTForCausalLM", WITHOUT_GROUPS | {
        "ffn_dim": 64, "word_embed_proj_dim": 64}),
    Model("Jamba", "decoder", "Jamba JambaForCausalLM", EXPERTS | {
        "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False,
        "mamba_d_state": 8, "mamba_dt_rank": 4}),
    Model("BERT, decoder", "decoder", "Bert BertLMHeadModel", WITHOUT_GROUPS | {
        "is_decoder": True}),
    Model("T5", "encoder-decoder", "T5 T5ForConditionalGeneration", {
        "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2,
        "decoder_start_token_id": 0, "initializer_factor": 0.5}),
    Model("Bart", "encoder-decoder", "Bart BartForConditionalGeneration", {
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "decoder_start_token_id": 1, "forced_eos_token_id": None, "init_std": 0.2}),
    Model("BERT", "encoder", "Bert BertModel"),
    Model("RoBERTa", "encoder", "Roberta RobertaModel"),
    Model("DistilBERT", "encoder", "DistilBert DistilBertModel", {
        "dim": 64, "n_heads": 4, "n_layers": 2, "hidden_dim": 64}),
    Model("ELECTRA", "encoder", "Electra ElectraModel", {"embedding_size": 32}),
    Model("ModernBERT", "encoder", "ModernBert ModernBertModel", {
        "local_attention": 4, "global_attn_every_n_layers": 2}),
    Model("CLIP, text", "encoder", "CLIPText CLIPTextModel", {"eos_token_id": 60}),
    Model("SigLIP, text", "encoder", "SiglipText SiglipTextModel"),
    Model("ViT", "images", "ViT ViTModel", VISION),
    Model("DINOv2", "images", "Dinov2 Dinov2Model", VISION | {"mlp_ratio": 1}),
    Model("CLIP, vision", "images", "CLIPVision CLIPVisionModel", VISION),
    Model("SigLIP, vision", "images", "SiglipVision SiglipVisionModel", VISION),
    Model("PaliGemma", "images and text", "PaliGemma PaliGemmaForConditionalGeneration"),
    Model("Gemma 3, images", "images and text", "Gemma3 Gemma3ForConditionalGeneration"),
    Model("Whisper", "audio", "Whisper WhisperForConditionalGeneration", {
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32,
        "decoder_start_token_id": 1, "init_std": 0.2}),
    Model("wav2vec 2", "audio", "Wav2Vec2 Wav2Vec2Model", {
        "conv_dim": (16, 16), "conv_kernel": (4, 4), "conv_stride": (4, 4),
        "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2}),
    Model("Falcon", "decoder", "Falcon FalconForCausalLM", {"head_dim": "default"}),
    Model("GPT-J", "decoder", "GPTJ GPTJForCausalLM", {"rotary_dim": 8}),
    Model("Bloom", "decoder", "Bloom BloomForCausalLM"),
    Model("MPT", "decoder", "Mpt MptForCausalLM", {"d_model": 64, "n_heads": 4, "n_layers": 2}),
]  # fmt: skip


def build(row: Model, implementation: str) -> torch.nn.Module:
    register()
    torch.manual_seed(0)
    config_class, model_class = row.classes.split()
    options = SMALL | row.config
    options = {name: x for name, x in options.items() if x != "default"}
    if row.kind == "images and text":
        options = _image_config(config_class)
    config = getattr(transformers, f"{config_class}Config")(**options)
    config._attn_implementation = implementation
    model = getattr(transformers, model_class)(config).eval()
    for name, x in model.named_parameters():
        if "mm_input_projection_weight" in name:  # zeros, before a norm
            torch.nn.init.normal_(x, std=0.2)
        if row.name == "Gemma 4" and "q_norm" in name:  # the only scale of its scores
            torch.nn.init.constant_(x, x.numel() ** -0.5)
    return model


def _image_config(kind: str) -> dict[str, Any]:
    vision = {
        k: v
        for k, v in (SMALL | {"initializer_range": 0.02}).items()
        if k not in ("vocab_size", "num_key_value_heads")
    }
    text = SMALL | {"initializer_range": 0.05, "query_pre_attn_scalar": 16}
    if kind == "Gemma3":
        text |= ALTERNATING
    else:
        text |= {"model_type": "gemma"}
    return {
        "text_config": text, "vision_config": vision | VISION | {"projection_dim": 64},
        "image_token_id": IMAGE, "image_token_index": IMAGE, "mm_tokens_per_image": 16,
        "projection_dim": 64, "hidden_size": 64, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": None, "boi_token_index": 62, "eoi_token_index": 61,
    }  # fmt: skip


def tokens(*shape: int) -> Tensor:
    return torch.randint(2, 60, shape, generator=torch.Generator().manual_seed(sum(shape)))


def padding(side: str | None, batch: int = 2, length: int = 12, short: int = 8) -> Tensor:
    """The last sequence of the batch is shorter."""
    mask = torch.ones(batch, length, dtype=torch.long)
    if side is not None:
        mask[-1, slice(short, None) if side == "right" else slice(length - short)] = 0
    return mask


def batch_of(row: Model, side: str | None) -> dict[str, Tensor]:
    if row.kind == "images":
        return {
            "pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        }
    mask = padding(side)
    ids = tokens(2, 12) * mask
    if row.name == "Whisper":
        features = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
        return {"input_features": features, "labels": tokens(2, 7)}
    if row.kind == "audio":
        sound = torch.randn(2, 192, generator=torch.Generator().manual_seed(0))
        return {"input_values": sound, "attention_mask": padding(side, length=192, short=128)}
    if row.kind == "encoder":
        return {"input_ids": ids, "attention_mask": mask}
    if row.kind == "encoder-decoder":
        # As long as the encoder's sequences, but padded elsewhere.
        answers = padding("right" if side else None, short=10)
        labels = tokens(2, 12).masked_fill(answers == 0, -100)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels,
                "decoder_attention_mask": answers}  # fmt: skip
    batch = {}
    if row.kind == "images and text":
        image = torch.full((2, 16), IMAGE)
        ids = torch.cat([ids[:, :8], image, ids[:, 8:]], 1)
        mask = torch.cat([mask[:, :8], torch.ones_like(image), mask[:, 8:]], 1)
        pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        types = (ids == IMAGE).long()
        if row.name == "PaliGemma":  # the last tokens are its answer
            types = mask.clone()
            types[:, :24] = 0
        batch = {"token_type_ids": types, "pixel_values": pixels}
    # A sequence's first token is not predicted: before it there is padding or nothing.
    predicted = mask * torch.roll(mask, 1, 1)
    labels = ids.masked_fill(predicted == 0, -100)
    return batch | {"input_ids": ids, "attention_mask": mask, "labels": labels}


def train(model: torch.nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """Return loss, logits of real tokens, and every gradient."""
    result = model(**batch)
    out = result.logits if "logits" in result else result.last_hidden_state
    real = batch.get("attention_mask")
    if "labels" in batch and "decoder_attention_mask" in batch:
        real = batch["decoder_attention_mask"]
    if real is not None and real.shape == out.shape[:2]:
        out = out[real.bool()]
    loss = result.loss if "labels" in batch else out.square().mean()
    trained = [x for x in model.parameters() if x.requires_grad]
    gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    return [loss.detach(), out.detach(), *(x for x in gradients if x is not None)]


def generate(model: Any, batch: dict[str, Tensor], **options: Any) -> list[Tensor]:
    given = {k: v for k, v in batch.items() if k not in ("labels", "decoder_attention_mask")}
    options = {"max_new_tokens": 6, "do_sample": False} | options
    return [model.generate(**given, **options)]


def both(row: Model, function: Callable[[torch.nn.Module], list[Tensor]]) -> None:
    """Assert that a function of the model gives the same with both implementations."""
    want, got = (function(build(row, name)) for name in ("eager", "torch_attn"))
    assert len(want) == len(got)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)


def check_training(row: Model) -> None:
    both(row, lambda model: train(model, batch_of(row, None)))


def check_padded_training(row: Model) -> None:
    for side in ("right", "left"):
        both(row, lambda model, side=side: train(model, batch_of(row, side)))


def check_generate(row: Model) -> None:
    side = "right" if row.kind == "encoder-decoder" else "left"
    for options in ({}, {"num_beams": 2}):
        both(row, lambda model, o=options: generate(model, batch_of(row, side), **o))


def check_static_cache(row: Model) -> None:
    """Decode in compiled code, and read a prompt in parts."""
    compiled: Any = transformers.CompileConfig(backend="eager", fullgraph=False)
    compiled.mode, compiled._compile_all_devices = None, True  # a CPU too
    side = "right" if row.kind == "encoder-decoder" else "left"
    batch = batch_of(row, side)
    for options in ({"compile_config": compiled}, {"prefill_chunk_size": 5}):
        if "prefill_chunk_size" in options and row.kind != "decoder":
            continue
        (want,) = generate(build(row, "eager"), batch, **options)
        torch._dynamo.reset()
        (got,) = generate(build(row, "torch_attn"), batch, cache_implementation="static", **options)
        torch.testing.assert_close(got, want)


def check_compiled(row: Model) -> None:
    batch: dict[str, Any] = batch_of(row, "right")
    batch.pop("labels", None)
    if row.name == "Whisper" or row.kind == "encoder-decoder":
        batch["decoder_input_ids"] = tokens(2, 12)
        batch["use_cache"] = False  # torch 2.11 cannot trace how such a cache is made
    torch._dynamo.reset()
    with torch.no_grad():
        model = build(row, "torch_attn")
        want = model(**batch)[0]
        got = torch.compile(model, backend="eager", fullgraph=True)(**batch)[0]
        mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
        if mask is not None and mask.shape == got.shape[:2]:
            got, want = got[mask.bool()], want[mask.bool()]
    torch.testing.assert_close(got, want)


TEXT = ("decoder", "encoder-decoder", "images and text")
EVERY = (*TEXT, "encoder", "images", "audio")
COLUMNS: dict[str, tuple[Callable[[Model], None], tuple[str, ...]]] = {
    "training": (check_training, EVERY),
    "padded": (check_padded_training, (*TEXT, "encoder")),
    "generate": (check_generate, TEXT),
    "static cache": (check_static_cache, TEXT),
    "compile": (check_compiled, EVERY),
}
PAGE = Path(__file__).parents[2] / "docs" / "hugging-face.md"
HEAD = f"| model | kind | {' | '.join(COLUMNS)} |"
TABLE = re.compile(rf"^{re.escape(HEAD)}\n(?:\|.*\n)*", re.MULTILINE)


def cell(row: Model, column: str) -> str:
    check, kinds = COLUMNS[column]
    if row.kind not in kinds:
        return ""
    try:
        check(row)
    except Exception as error:
        print(f"{row.name}, {column}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return "no"
    return "yes"


def main() -> None:
    lines = [HEAD, "|---" * (2 + len(COLUMNS)) + "|"]
    for row in MODELS:
        cells = [row.name, row.kind, *(cell(row, column) for column in COLUMNS)]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    table = "\n".join(lines) + "\n"
    PAGE.write_text(TABLE.sub(lambda _: table, PAGE.read_text()))


if __name__ == "__main__":
    main()
