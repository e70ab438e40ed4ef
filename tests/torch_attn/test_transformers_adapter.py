"""transformers models against their own eager attention; nothing is downloaded."""

import os
from inspect import signature

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers.masking_utils import sdpa_mask  # noqa: E402

from tests.torch_attn.transformers_models import COLUMNS, PAGE, TABLE  # noqa: E402
from tests.torch_attn.transformers_models import MODELS as MODELS_OF_THE_TABLE  # noqa: E402
from torch_attn import flash_attention  # noqa: E402
from torch_attn.adapters.transformers import Mask, attention_forward, make_mask, masks, register  # noqa: E402
from twin_attention.contract.spec import Window  # noqa: E402

SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "pad_token_id": 0, "attn_implementation": "torch_attn",
}  # fmt: skip
WINDOW = 5


def model(kind: str, **options):
    register()
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL | options)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


MODELS = {
    "Llama": {},
    "Mistral": {"sliding_window": WINDOW},
    # a window in one layer and none in the other; softcap
    "Gemma2": {
        "sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # its layers are told of the window only by the mask
    "PhiMoE": {"sliding_window": WINDOW, "num_local_experts": 2},
    # sinks, with a window in every other layer
    "GptOss": {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 2},
}  # fmt: skip
KINDS = {"PhiMoE": "Phimoe"}


@pytest.fixture(scope="module", params=MODELS)
def causal_model(request):
    return model(KINDS.get(request.param, request.param), **MODELS[request.param])


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(sum(shape)))


def both(model, function):
    results = []
    for implementation in ("eager", "torch_attn"):
        model.set_attn_implementation(implementation)
        results.append(function(model))
    return results


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want)


def test_whole_sequences(causal_model):
    ids = tokens(2, 12)
    with torch.no_grad():
        ones = torch.ones_like(ids)
        eager, ours = both(causal_model, lambda m: m(ids, attention_mask=ones).logits)
        assert_close(ours, eager)
        last_changed = causal_model(torch.cat([ids[:, :-1], tokens(2, 1)], 1)).logits
    assert_close(last_changed[:, :-1], ours[:, :-1])
    assert (last_changed[:, -1] - ours[:, -1]).abs().max() > 1e-3


def test_prefill_in_parts_and_decode(causal_model):
    ids = tokens(2, 12)

    def run(m):
        cache = transformers.DynamicCache(config=m.config)
        parts = ids.split([4, 5, 1, 1, 1], dim=1)
        return torch.cat([m(part, past_key_values=cache).logits for part in parts], 1)

    with torch.no_grad():
        eager, ours = both(causal_model, run)
        assert_close(ours, eager)
        assert_close(ours, causal_model(ids).logits)


@pytest.mark.parametrize("causal_model", ["Llama", "GptOss"], indirect=True)
def test_generate(causal_model):
    eager, ours = both(
        causal_model,
        lambda m: m.generate(
            tokens(2, 4),
            max_new_tokens=6,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        ),
    )
    assert torch.equal(eager.sequences, ours.sequences)
    assert_close(torch.stack(ours.logits), torch.stack(eager.logits))


@pytest.mark.parametrize(("kind", "checkpointing"), [("Llama", True), ("GptOss", False)])
def test_training(kind, checkpointing):
    trained = model(kind, **MODELS[kind]).train()
    if checkpointing:
        trained.gradient_checkpointing_enable()
    ids = tokens(2, 12)

    def gradients(m):
        return torch.autograd.grad(m(ids, labels=ids).loss, list(m.parameters()))

    for want, got in zip(*both(trained, gradients), strict=True):
        assert_close(got, want)


def test_sinks_in_the_models_dtype():
    """They are float32 in `flash_attention`, and bfloat16 in the models that have them."""
    x = torch.randn(2, 4, 5, 16, dtype=torch.bfloat16)
    sinks = torch.randn(4, dtype=torch.bfloat16, requires_grad=True)
    out, _ = attention_forward(torch.nn.Module(), x, x, x, Mask(Window(None, 0)), s_aux=sinks)
    want = flash_attention(*(x.transpose(1, 2),) * 3, causal=True, sinks=sinks.float())
    assert torch.equal(out, want)
    (got,) = torch.autograd.grad(out.float().sum(), sinks)
    assert got.dtype == torch.bfloat16
    assert (got != 0).all()


def test_a_window_that_the_model_tells_the_mask_alone_is_kept():
    """As if a layer did not pass `sliding_window` on, which some models do not."""
    mistral = model("Mistral", sliding_window=WINDOW)
    for layer in mistral.model.layers:
        layer.self_attn.config = transformers.MistralConfig(**SMALL, sliding_window=None)
    ids = tokens(2, 12)
    with torch.no_grad():
        eager = both(model("Mistral", sliding_window=WINDOW), lambda m: m(ids).logits)[0]
        assert_close(mistral(ids).logits, eager)


def test_a_causal_model_called_bidirectionally():
    llama = model("Llama")
    with torch.no_grad():
        eager, ours = both(llama, lambda m: m(tokens(2, 9), is_causal=False).logits)
        assert_close(ours, eager)
        assert (ours - llama(tokens(2, 9)).logits).abs().max() > 1e-3


def test_compiled():
    llama = model("Llama")
    with torch.no_grad():
        want = llama(tokens(2, 9)).logits
        compiled = torch.compile(llama, backend="eager", fullgraph=True)
        assert_close(compiled(tokens(2, 9)).logits, want)


# Documents longer and shorter than the window, and of one token.
DOCUMENTS = [tokens(1, n)[0].tolist() for n in (9, 1, 4, 12)]


def collate(**options):
    collator = transformers.DataCollatorWithFlattening(return_tensors="pt", **options)
    return collator([{"input_ids": document} for document in DOCUMENTS])


def one_by_one(model, function):
    model.set_attn_implementation("eager")
    found = [function(model, torch.tensor([document])) for document in DOCUMENTS]
    model.set_attn_implementation("torch_attn")
    return found


PACKINGS = {
    "position_ids": collate() | {"use_cache": False},
    "position_ids and a cache": collate(),
    "cu_seq_lens": collate(return_flash_attn_kwargs=True),
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_sequences_are_as_one_by_one(causal_model, packing):
    batch = {name: x for name, x in PACKINGS[packing].items() if name != "labels"}
    with torch.no_grad():
        want = one_by_one(causal_model, lambda m, ids: m(ids).logits)
        assert_close(causal_model(**batch).logits, torch.cat(want, 1))
        mixed = causal_model(batch["input_ids"]).logits
        assert (mixed - torch.cat(want, 1)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("kind", "packing"),
    [("Llama", "position_ids"), ("Llama", "cu_seq_lens"), ("GptOss", "cu_seq_lens")],
)
def test_training_on_packed_sequences(kind, packing):
    trained = model(kind, **MODELS[kind]).train()
    parameters = list(trained.parameters())

    def loss(m, ids, **options):
        options = {"labels": ids} | options
        # A sum over tokens, so that the documents' losses add up.
        return m(ids, num_items_in_batch=torch.tensor(1), **options).loss

    lengthy = [document for document in DOCUMENTS if len(document) > 1]  # one token has no loss
    trained.set_attn_implementation("eager")
    losses = [loss(trained, torch.tensor([document])) for document in lengthy]
    want = torch.autograd.grad(sum(losses), parameters)
    trained.set_attn_implementation("torch_attn")
    batch = dict(PACKINGS[packing])
    got = torch.autograd.grad(loss(trained, batch.pop("input_ids"), **batch), parameters)
    for x, y in zip(got, want, strict=True):
        assert_close(x, y)


def test_rows_of_packed_sequences_by_position_ids():
    """Each row of a batch may hold several documents."""
    llama = model("Llama")
    ids, positions = tokens(2, 8), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [*range(6), 0, 1]])
    with torch.no_grad():
        for known in (positions, positions[1:]):  # one for all rows
            eager, ours = both(
                llama, lambda m, x=known: m(ids, position_ids=x, use_cache=False).logits
            )
            assert_close(ours, eager)
            assert_close(llama(ids, position_ids=known).logits, eager)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("order_within", [1, -1])
@pytest.mark.parametrize("remapped", [False, True])
def test_packed_masks_of_every_version(order, order_within, remapped):
    """Versions join the same functions in another order, and some count positions within them."""
    masks = transformers.masking_utils
    if remapped and not hasattr(masks, "remap_positions_for_packed_sequence"):
        pytest.skip("this transformers does not count positions within packed sequences")
    ids, positions = torch.tensor([[0, 0, 1]]), torch.tensor([[0, 1, 0]])
    packed = masks.packed_sequence_mask_function(ids)
    sliding = [masks.sliding_window_overlay(2), masks.causal_mask_function][::order_within]
    for within, window in ((sliding, 1), (sliding[:1] * 2, None), (sliding[1:], None)):
        both = masks.and_masks(*within) if len(within) == 2 else masks.causal_mask_function
        if remapped:
            both = masks.remap_positions_for_packed_sequence(both, positions)
        both = [packed, both][::order]
        known = {"mask_function": masks.and_masks(*both), "allow_is_causal_skip": False}
        found = make_mask(1, 3, 3, local_size=None if window is None else 2, **known)
        if len(within) == 2 and within[0] is within[1]:
            assert list(found.operands) == ["bias"]
            continue
        assert found.window == Window(window, 0)
        assert torch.equal(found.operands["q_segment_ids"], ids.int())
        assert torch.equal(found.operands["kv_segment_ids"], ids.int())


@pytest.mark.parametrize("missing", ["cu_seq_lens_q", "cu_seq_lens_k"])
def test_refuses_half_of_the_offsets(missing):
    batch = dict(PACKINGS["cu_seq_lens"])
    del batch[missing]
    with pytest.raises(ValueError, match=f"{missing}: expected cu_seq_lens_q and cu_seq_lens_k, o"):
        model("Llama")(**batch)


IDS = tokens(2, 8)
RIGHT_PADDED = torch.ones_like(IDS).index_fill(1, torch.tensor([7]), 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_attentions": True}, "output_attentions: expected None or False"),
        ({"an_option_of_tomorrow": 1.0}, "an_option_of_tomorrow: expected None or False, got flo"),
        (
            PACKINGS["cu_seq_lens"] | {"attention_mask": torch.tensor([[1] * 25 + [0]])},
            "attention_mask: expected None, or a causal, sliding or full mask without padding",
        ),
        (
            {"attention_mask": torch.ones(2, 1, 8, 8).bool(), "softcap": 2.0},
            "attention_mask: expected with softcap a causal, sliding",
        ),
        ({"position_ids": torch.tensor([[0, 1, 0, 1]]), "past": 4}, "position_ids: expected cons"),
    ],
    ids=lambda x: next(reversed(x)) if isinstance(x, dict) else "",
)
def test_refuses(options, message):
    llama = model("Llama")
    options = {"input_ids": IDS} | options
    if past := options.pop("past", None):
        cache = llama(IDS[:, :past]).past_key_values
        options |= {"past_key_values": cache, "input_ids": IDS[:, past:]}
    with pytest.raises(NotImplementedError) as caught:
        llama(**options)
    assert str(caught.value).startswith(message)


def test_compiled_code_refuses_packed_sequences_with_a_cache():
    compiled = torch.compile(model("Llama"), backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(RuntimeError, match="position_ids: expected consecutive"):
        compiled(IDS, position_ids=torch.arange(8)[None] % 5)


def test_a_models_own_attention_is_named():
    register()
    sizes = {"vocab_size": 64, "hidden_size": 64, "n_layer": 1, "n_head": 4}
    sizes |= {"attn_implementation": "torch_attn"}
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(**sizes))
    with pytest.raises(NotImplementedError, match="got one with attention of its own"):
        bloom(IDS)
    mask = make_mask(2, 8, 8)
    assert not hasattr(mask, "shape")
    uses = [lambda: mask.to(torch.bool), lambda: torch.where(mask, 0, 1), lambda: IDS + mask]
    for use in (*uses, lambda: mask[:, 0], lambda: 1.0 - mask):
        with pytest.raises(NotImplementedError, match="got one with attention of its own"):
            use()


def test_a_mask_moves_to_another_device():
    moved = make_mask(2, 8, 8, attention_mask=RIGHT_PADDED.bool()).to("meta")
    assert {x.device.type for x in moved.operands.values()} == {"meta"}
    assert moved.window == Window(None, 0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("kind", ["Llama", "Mistral", "GptOss"])
def test_a_mask_of_the_users(kind, dtype):
    """It replaces all others, a window too."""
    visible = torch.ones(2, 1, 8, 8).tril().bool() & RIGHT_PADDED.bool()[:, None, None]
    visible[:, :, 2:, 1] = False
    lowest = torch.finfo(torch.float32).min
    added = torch.zeros(2, 1, 8, 8).masked_fill(~visible, lowest)
    mask = {torch.bool: visible, torch.float32: added}[dtype]
    user_model = model(kind, **MODELS[kind])
    with torch.no_grad():
        user_model.set_attn_implementation("eager")
        want = user_model(IDS, attention_mask=added).logits
        user_model.set_attn_implementation("torch_attn")
        assert_close(user_model(IDS, attention_mask=mask).logits, want)


@pytest.mark.parametrize("padded", [False, True])
def test_a_static_cache_of_the_users(causal_model, padded):
    check_a_static_cache(causal_model, padded, causal_model)


def test_a_compiled_model_with_a_static_cache():
    llama = model("Llama", num_hidden_layers=1)
    check_a_static_cache(llama, True, torch.compile(llama, backend="eager"))


def check_a_static_cache(causal_model, padded, compiled):
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    steps = [(0, 4), (4, 9), (9, 10), (10, 11), (11, 12)]  # a later prompt as well

    def run(cache, call):
        outs = []
        for start, stop in steps:
            known = {"attention_mask": mask[:, :stop]} if padded else {}
            outs.append(call(ids[:, start:stop], past_key_values=cache, **known).logits)
        return torch.cat(outs, 1)[mask.bool()]

    with torch.no_grad():
        causal_model.set_attn_implementation("eager")
        want = run(transformers.DynamicCache(config=causal_model.config), causal_model)
        causal_model.set_attn_implementation("torch_attn")
        cache = transformers.StaticCache(causal_model.config, max_cache_len=16)
        assert_close(run(cache, compiled), want)


def test_a_decoding_step_does_not_wait_for_the_device(monkeypatch):
    def fail(*_):
        raise AssertionError("reads a tensor")

    offset, seen = torch.tensor(5), torch.ones(2, 6, dtype=torch.bool)
    for name in ("__bool__", "__int__", "__index__", "item", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, fail)
    make_mask(2, 1, 6, 5, attention_mask=seen)
    static = make_mask(2, 1, 16, offset, attention_mask=seen, allow_is_causal_skip=False)
    monkeypatch.undo()
    expected = [[0] * 6 + [-1] * 10] * 2
    assert static.operands["kv_segment_ids"].tolist() == expected


def test_dropout_follows_the_seed_of_torch():
    trained = model("Llama", attention_dropout=0.5).train()

    def logits(seed):
        torch.manual_seed(seed)
        return trained(IDS).logits

    first = logits(0)
    assert torch.equal(logits(0), first)
    assert not torch.equal(logits(1), first)


def test_t5_and_the_gradient_of_its_position_bias():
    register()
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=16, d_ff=32, num_layers=2, num_heads=2,
        decoder_start_token_id=0, attn_implementation="torch_attn",
    )  # fmt: skip
    t5 = transformers.T5ForConditionalGeneration(config).eval()

    def loss(t5):
        t5.zero_grad()
        out = t5(input_ids=tokens(2, 9), labels=tokens(2, 7))
        out.loss.backward()
        tables = [x.grad for name, x in t5.named_parameters() if "relative_attention" in name]
        assert len(tables) == 2
        return [out.logits.detach(), *tables]

    for got, want in zip(*both(t5, loss), strict=True):
        assert_close(got, want)
    # One query of one head: an axis of size 1, with any stride, comes last.
    generated = both(t5, lambda t5: t5.generate(tokens(2, 9), max_new_tokens=5, do_sample=False))
    assert torch.equal(*generated)


@pytest.mark.parametrize(
    ("mask", "options", "message"),
    [
        (
            Mask(Window(None, 0)),
            {"is_causal": False},
            "is_causal: expected what the model's mask says",
        ),
        (None, {}, "is_causal: expected a bool where there is no attention_mask"),
        (None, {"is_causal": True, "sliding_window": 3}, "attention_mask: expected a mask of the"),
    ],
)
def test_a_layer_without_its_mask_is_refused(mask, options, message):
    q, k = torch.zeros(1, 4, 5, 16), torch.zeros(1, 2, 5, 16)
    with pytest.raises(NotImplementedError) as caught:
        attention_forward(torch.nn.Module(), q, k, k, mask, **options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("causal", [False, True])
def test_a_layer_without_a_mask_says_whether_it_is_causal(causal):
    q, k = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16)
    want = flash_attention(*(x.transpose(1, 2) for x in (q, k, k)), causal=causal)
    layer = torch.nn.Module()
    assert torch.equal(attention_forward(layer, q, k, k, None, is_causal=causal)[0], want)
    layer.is_causal = causal
    assert torch.equal(attention_forward(layer, q, k, k, None)[0], want)


def test_a_layers_tensors_may_have_any_strides():
    qkv = [torch.randn(1, heads, 16, 5).mT for heads in (4, 2, 2)]
    got, want = (
        attention_forward(torch.nn.Module(), *x, None, is_causal=True)[0]
        for x in (qkv, [x.contiguous() for x in qkv])
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize("position_ids", [None, torch.arange(8)[None] % 5])
@pytest.mark.parametrize(
    "options",
    [
        {"or_mask_function": lambda b, h, q, k: k == 6},
        {"and_mask_function": lambda b, h, q, k: k != 2},
        {"block_sequence_ids": torch.arange(8)[None].expand(2, 8) % 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_mask_function_of_the_users_is_a_bias(options, position_ids):
    from transformers.masking_utils import create_causal_mask

    llama, x = model("Llama"), torch.zeros(2, 8, 64)
    options |= {"position_ids": position_ids}
    eager, ours = both(llama, lambda m: create_causal_mask(m.config, x, None, None, **options))
    assert list(ours.operands) == ["bias"]
    assert torch.equal(ours.operands["bias"] == 0, eager == 0)
    assert torch.equal(ours.operands["bias"] == -torch.inf, eager < 0)


BLOCKS = torch.tensor([[0, 0, 0, -1, -1, 1, 1, -1], [-1, 4, 4, -1, 5, 5, 5, 6]])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", ["", "of causal tokens", "of all tokens"])
def test_blocks_are_ranges(window, padded):
    from transformers import masking_utils as theirs

    mistral, x = model("Mistral"), torch.zeros(2, 8, 64)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, 6:] = mask[1, 0] = 0
    make, options = theirs.create_causal_mask, {"block_sequence_ids": BLOCKS}
    if window == "of all tokens":
        blocks, sliding = theirs.blockwise_overlay(BLOCKS), theirs.sliding_window_overlay(2)
        options = {"or_mask_function": blocks, "and_mask_function": sliding}
    elif window:
        make = theirs.create_sliding_window_causal_mask
    given = mask if padded else None
    eager, ours = both(mistral, lambda m: make(m.config, x, given, None, **options))
    key, ranges = torch.arange(8), ours.operands.pop("q_ranges")
    assert {*ours.operands} == ({"q_segment_ids", "kv_segment_ids"} if padded else set())
    seen = (key <= key[:, None]) & (key >= key[:, None] - (ours.window.left or 8))
    seen = seen | (ranges[..., 0, :1] <= key) & (key < ranges[..., 0, 1:])
    if padded:
        seen = seen & (mask == 1)[:, None]
    rows = seen.any(2)
    assert torch.equal(seen[rows], (eager[:, 0] == 0)[rows])


CHOSEN = {
    "Gemma 2": ["padded", "static cache"],
    "Gemma 4": ["training", "generate"],  # with the sizes of real heads
    "gpt-oss": ["padded", "generate", "static cache"],
    "Llama 4": ["padded", "generate", "static cache"],
    "T5": ["padded", "generate", "static cache", "compile"],
    "ModernBERT": ["padded", "compile"],
    "PaliGemma": ["training", "padded"],
    "Gemma 3, images": ["training", "padded", "generate"],
}


@pytest.mark.parametrize(
    ("row", "column"),
    [(row, column) for row in MODELS_OF_THE_TABLE for column in CHOSEN.get(row.name, ())],
    ids=lambda x: getattr(x, "name", x),
)
def test_a_model_of_the_table(row, column, monkeypatch):
    chunked = transformers.masking_utils.create_chunked_causal_mask
    if row.name == "Llama 4" and "block_sequence_ids" not in signature(chunked).parameters:
        pytest.skip("this transformers cannot prepare chunked masks for a static cache")

    def of_one_query(batch, length, *others, **options):
        assert length == 1, "pairs of tokens are in memory"
        return sdpa_mask(batch, length, *others, **options)

    monkeypatch.setattr(masks, "sdpa_mask", of_one_query)
    COLUMNS[column][0](row)


def test_the_table_has_the_models():
    (table,) = TABLE.findall(PAGE.read_text())
    rows = [line.split(" | ")[:2] for line in table.splitlines()[2:]]
    assert rows == [[f"| {row.name}", row.kind] for row in MODELS_OF_THE_TABLE]


def test_refuses_a_name_that_transformers_takes_for_flash_attn():
    with pytest.raises(ValueError, match="name: expected a name without"):
        register("flash_twin")
