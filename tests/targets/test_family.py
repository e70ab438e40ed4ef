import sys
from dataclasses import replace

import pytest

import torch_attn.families  # noqa: F401
from pallas_attn import private
from twin_attention.contract.paged_spec import AppendSpec, DecodeSpec, PagedCache, PagedSpec
from twin_attention.contract.spec import AttentionSpec, VarlenSpec, Window
from twin_attention.interop.kernels import in_jax
from twin_attention.interop.parity.cases import DecodeCase, FlashCase, PagedCase
from twin_attention.targets import family, foreign, sm90, versions
from twin_attention.targets.describe import describe, describe_call
from twin_attention.targets.family import FAMILIES, Backend, Family, choose
from twin_attention.targets.kernels import FAMILY_KERNELS
from twin_attention.targets.splits import ROWS_OF_CHUNKS, block_rows, decode_kernel

SPEC = AttentionSpec(1, 128, 128, 2, 2, 64, 64, "float16", 0.125)
GLUON, GLUON_SM90, TRITON, REFERENCE = FAMILIES["torch_attn"]


def only_head_size_128(operation, spec, target):
    if target != "sm90":
        return "it is for sm90"
    return None if spec.head_dim == 128 else f"head dimension {spec.head_dim}"


def forward_alone(operation, spec, target):
    return None if operation == "flash_fwd" else "it has no backward"


@pytest.fixture
def fast(monkeypatch):
    """A family before the others, for few problems, without an interpreter."""
    fast = Family("fast", "torch_attn", "sm90", covers=only_head_size_128)
    monkeypatch.setitem(family.FAMILIES, "torch_attn", (fast, TRITON, REFERENCE))
    return fast


def choice(implementation, target, spec=SPEC, interpretable=True, operation="flash_fwd"):
    return choose("torch_attn", implementation, operation, spec, target, interpretable)


def described(package, target, spec, implementation=None, function="flash_attention"):

    def describe_operation(operation):
        chosen = choose(package, implementation, operation, spec, target, True)
        return describe(implementation, operation, *chosen, spec, "a card", 108)

    return describe_call(function, describe_operation)


def test_the_explicit_kernels_are_the_best_choice_for_sm80():
    assert choice(None, "sm80") == choice("gluon", "sm80") == (Backend(GLUON, "sm80"), ())
    packed = VarlenSpec(**vars(SPEC), num_sequences=3)
    for operation in ("flash_fwd", "flash_bwd"):
        assert choice(None, "sm80", packed, operation=operation) == (Backend(GLUON, "sm80"), ())
    wide = replace(SPEC, dtype="float32")
    reason = "gluon: its products take float16 and bfloat16, not float32"
    others = (reason, "gluon: its kernels are for SM90")
    assert choice(None, "sm80", wide) == (Backend(TRITON, "sm80"), others)
    append = AppendSpec(2, 1, PagedCache(3, 16, 4, 2, 64, 64, "float16"), "float16")
    assert choice(None, "sm80", append)[1] == (
        "gluon: it has only flash attention",
        "gluon: it has only flash attention and paged attention",
    )
    with pytest.raises(NotImplementedError, match=r"and it has no interpreter$"):
        choice("gluon", None)


def test_the_explicit_kernels_are_the_best_for_sm90():
    other = "gluon: its kernels are for SM80"
    chosen = Backend(GLUON_SM90, "sm90"), (other,)
    assert choice(None, "sm90") == choice("gluon", "sm90") == chosen
    for problem, reason in (
        ({"dtype": "float32"}, "its products take float16 and bfloat16, not float32"),
        ({"rows_aligned": False}, "TMA loads rows that begin at multiples of 16 bytes"),
    ):
        others = (other, f"gluon: {reason}")
        spec = replace(SPEC, **problem)
        assert choice(None, "sm90", spec) == (Backend(TRITON, "sm90"), others)
    for problem in ({"seq_kv": 16}, {"head_dim": 256}, {"head_dim_v": 136}):
        spec = replace(SPEC, **problem)
        assert choice("gluon", "sm90", spec, operation="flash_bwd") == chosen
    spec = replace(SPEC, seq_kv=15)
    assert choice(None, "sm90", spec) == chosen
    reason = "its backward takes at least 16 keys"
    backward = choice(None, "sm90", spec, operation="flash_bwd")
    assert backward == (Backend(TRITON, "sm90"), (other, f"gluon: {reason}"))
    with pytest.raises(NotImplementedError, match=rf"for SM80; {reason}$"):
        choice("gluon", "sm90", spec, operation="flash_bwd")


@pytest.fixture
def importable(monkeypatch):
    monkeypatch.setattr(versions, "older_jax", lambda *_: None)
    monkeypatch.setattr(family, "import_error", lambda module: None)
    monkeypatch.setattr(private, "missing", lambda group: None)


SMALL_HEADS = "its packed sequences have head dimensions above 64"


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("package", "operation", "head_dims", "reason"),
    [
        ("torch_attn", "flash_fwd", (64, 64), None),
        ("pallas_attn", "flash_fwd", (64, 72), None),
        ("pallas_attn", "flash_fwd", (256, 64), None),
        ("pallas_attn", "flash_fwd", (64, 64), SMALL_HEADS),
        ("pallas_attn", "flash_bwd", (64, 64), SMALL_HEADS),
        ("pallas_attn", "flash_bwd", (64, 72), None),
        ("pallas_attn", "flash_bwd", (128, 128), None),
        ("pallas_attn", "flash_bwd", (136, 128),
         "its backward of packed sequences has head dimensions up to 128"),
    ],
)  # fmt: skip
def test_packed_sequences_are_explicit_on_sm90_where_that_is_faster(
    package, operation, head_dims, reason
):
    spec = replace(SPEC, head_dim=head_dims[0], head_dim_v=head_dims[1])
    spec = VarlenSpec(**vars(spec), num_sequences=3)
    backend, passed_over = choose(package, None, operation, spec, "sm90", True)
    assert backend.family.folder == ("sm90" if reason is None else "portable")
    if reason is not None:
        assert any(line.endswith(f": {reason}") for line in passed_over)


@pytest.mark.parametrize("operation", ["flash_fwd", "flash_bwd"])
@pytest.mark.parametrize(
    "fields", [{"terms": ("alibi_slopes",)}, {"dropout_rate": 0.1}, {"row_max": True}]
)
def test_terms_run_in_the_explicit_kernels(fields, operation):
    dense = replace(SPEC, head_dim=128, head_dim_v=128, **fields)
    packed = VarlenSpec(**vars(dense), num_sequences=3)
    long = replace(packed, seq_q=2**16, seq_kv=2**16, heads_q=16, heads_kv=16)
    for spec in (dense, packed):
        assert choice(None, "sm90", spec, operation=operation)[0] == Backend(GLUON_SM90, "sm90")
    assert foreign.gluon_is_faster(operation, long, "sm90")
    if operation == "flash_fwd":
        with pytest.raises(NotImplementedError, match="its kernels"):
            choose("pallas_attn", "mosaic", operation, dense, "sm90", True)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("term", ["bias", "relative_bias"])
def test_jax_takes_the_explicit_kernels_for_gradients_of_terms(term, head_dim):
    spec = AttentionSpec(1, 4096, 4096, 16, 16, head_dim, head_dim, "bfloat16", 0.125)
    spec = replace(spec, terms=(term,))
    for window in (Window(), Window(None, 0)):
        masked = replace(spec, window=window)
        assert foreign.gluon_is_faster("flash_bwd", masked, "sm90")
        assert not foreign.gluon_is_faster("flash_bwd", replace(masked, deterministic=True), "sm90")


@pytest.mark.parametrize(
    ("operation", "seq", "heads", "heads_kv", "head_dim", "window", "faster"),
    [
        ("flash_fwd", 512, 32, 32, 64, Window(), True),
        ("flash_fwd", 1024, 32, 32, 64, Window(), False),
        ("flash_fwd", 512, 32, 32, 64, Window(None, 0), True),
        ("flash_fwd", 1024, 32, 32, 64, Window(None, 0), False),
        ("flash_fwd", 512, 32, 32, 64, Window(64, 0), False),
        ("flash_fwd", 512, 16, 16, 128, Window(None, 0), False),
        ("flash_fwd", 4096, 16, 16, 128, Window(None, 0), True),
        ("flash_fwd", 2048, 32, 32, 64, Window(), True),
        ("flash_fwd", 4096, 16, 16, 256, Window(), False),
        ("flash_bwd", 16384, 16, 16, 128, Window(None, 0), True),
        ("flash_bwd", 16384, 16, 16, 128, Window(), False),
        ("flash_bwd", 3000, 16, 4, 128, Window(None, 0), True),
        ("flash_bwd", 4096, 32, 8, 128, Window(None, 0), False),
        ("flash_bwd", 4096, 32, 8, 64, Window(), True),
        ("flash_bwd", 16384, 16, 16, 64, Window(64, 0), False),
    ],
)
def test_jax_takes_the_faster_kernels_of_dense_problems(
    operation, seq, heads, heads_kv, head_dim, window, faster
):
    spec = AttentionSpec(16, seq, seq, heads, heads_kv, head_dim, head_dim, "bfloat16", 0.1, window)
    assert foreign.gluon_is_faster(operation, spec, "sm90") == faster
    assert not foreign.gluon_is_faster(operation, spec, "sm80")
    short = replace(spec, batch=1, seq_q=64, seq_kv=64)  # the host takes longer
    assert not foreign.gluon_is_faster(operation, short, "sm90")


@pytest.mark.parametrize(
    ("operation", "head_dim", "fields"),
    [
        ("flash_fwd", 64, {"dropout_rate": 0.1}),
        ("flash_bwd", 128, {"terms": ("bias",), "wide_bias": True}),
        ("flash_bwd", 128, {"terms": ("relative_bias",)}),
        ("flash_bwd", 96, {"terms": ("relative_bias",), "seq_kv": 2048, "deterministic": True}),
    ],
)
def test_terms_that_are_slower_in_the_explicit_kernels_run_there_by_name(
    operation, head_dim, fields
):
    spec = replace(SPEC, head_dim=head_dim, head_dim_v=head_dim, **fields)
    assert choice("gluon", "sm90", spec, operation=operation)[0] == Backend(GLUON_SM90, "sm90")
    backend, reasons = choice(None, "sm90", spec, operation=operation)
    assert backend == Backend(TRITON, "sm90")
    assert any(x.startswith("gluon: its ") and x.endswith(" is slower") for x in reasons)
    assert not foreign.gluon_is_faster(operation, spec, "sm90")


def test_what_a_compiler_crashes_on_runs_in_the_portable_kernels():
    fields = {"tree": True, "depths": True, "window": Window(40, 0), "terms": ("bias",)}
    spec = replace(SPEC, **fields, dropout_rate=0.5)
    assert choice(None, "sm90", spec)[0] == Backend(TRITON, "sm90")
    with pytest.raises(NotImplementedError, match="crashes on windows of depths"):
        choice("gluon", "sm90", spec)
    for left_out in ({"depths": False}, {"terms": ()}, {"dropout_rate": 0}):
        assert sm90.supports("flash_fwd", replace(spec, **left_out), "sm90") is None


@pytest.mark.parametrize("target", ["sm80", "sm90"])
@pytest.mark.parametrize("operation", ["flash_fwd", "flash_bwd"])
def test_ranges_run_in_the_explicit_kernels_of_gluon_only(target, operation):
    spec = replace(SPEC, ranges=2)
    backend, _ = choose("torch_attn", None, operation, spec, target, True)
    assert (backend.family.name, backend.family.folder) == ("gluon", target)
    backend, _ = choose("pallas_attn", None, operation, spec, target, True)
    assert (backend.family.name, backend.family.folder) == ("triton", "portable")
    with pytest.raises(NotImplementedError, match="q_ranges run in kernels written in Triton"):
        choose("pallas_attn", "mosaic", operation, spec, target, True)


def test_jax_takes_the_explicit_kernels_for_ranges_outside_of_a_window():
    """As block diffusion has them."""
    own_key = AttentionSpec(1, 8192, 8192, 16, 16, 128, 128, "bfloat16", 0.1, Window(0, 0))
    assert not foreign.gluon_is_faster("flash_fwd", own_key, "sm90")
    assert foreign.gluon_is_faster("flash_fwd", replace(own_key, ranges=2), "sm90")


@pytest.mark.parametrize("package", ["torch_attn", "pallas_attn"])
def test_paged_attention_runs_in_the_portable_kernels(package):
    case = PagedCase("", (9,) * 4, heads_q=16, heads_kv=4, head_dim=128, new_tokens=(512,) * 4)
    spec = case.spec
    backend, _ = choose(package, None, "paged_attention", spec, "sm80", True)
    assert (backend.family.name, backend.family.folder) == ("triton", "portable")
    chunks = backend.configs(spec)["paged_attention"]
    assert (decode_kernel(spec), block_rows(spec, chunks)) == ("paged_attention", chunks.max_rows)
    few = replace(spec, tokens=spec.batch + 1)
    assert (decode_kernel(few), block_rows(few, chunks)) == ("paged_attention", ROWS_OF_CHUNKS)
    decodes = replace(spec, tokens=spec.batch)
    of_decode = backend.configs(spec.sequence(1))["paged_decode"]
    assert backend.configs(decodes)["paged_decode"] == of_decode
    assert (decode_kernel(decodes), block_rows(decodes, of_decode)) == ("paged_decode", 16)
    explicit = {"torch_attn": "gluon", "pallas_attn": "mosaic"}[package]
    with pytest.raises(NotImplementedError, match="it has only flash attention"):
        choose(package, explicit, "paged_attention", spec, "sm80", True)


CHUNKS = PagedCase("", (9,) * 4, heads_q=16, heads_kv=4, head_dim=128, new_tokens=(512,) * 4).spec


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"tokens": 4 * 31 + 1, "num_splits": 1}, None),  # rounded up, 32 tokens of 4 heads
        ({"tokens": 4 * 31}, "its paged attention is for chunks, of 128 query rows on average"),
        ({"heads_q": 20}, "its kv heads have a power of two of query heads, at most 64"),
        ({"rows_aligned": False}, "TMA loads rows that begin at multiples of 16 bytes"),
        ({"has_tree": True}, "its paged attention takes no trees"),
        ({"alibi": True}, "its paged attention takes no alibi_slopes"),
        ({"cache": replace(CHUNKS.cache, latent=True)},
         "its latent caches have values of 512 columns"),
        ({"num_splits": 2}, "it does not split keys"),
        ({"tokens": 510}, "it does not split keys"),  # 64 programs leave half of the SMs idle
        ({"tokens": 510, "num_splits": 1}, None),
        ({"cache": replace(CHUNKS.cache, dtype="int8")},
         "its products take float16 and bfloat16, not int8"),
        ({"cache": replace(CHUNKS.cache, page_size=48)},
         "its pages have a power of two of keys, at least 16"),
        ({"cache": replace(CHUNKS.cache, page_size=256)}, None),
    ],
)  # fmt: skip
def test_long_chunks_run_in_the_explicit_kernels(changes, reason):
    spec = replace(CHUNKS, **changes)
    backend, passed_over = choose("torch_attn", None, "paged_attention", spec, "sm90", True)
    assert backend == Backend(GLUON_SM90 if reason is None else TRITON, "sm90")
    assert passed_over[1:] == (() if reason is None else (f"gluon: {reason}",))
    assert sm90.supports("paged_attention", spec, "sm90") == reason
    assert sm90.supports("paged_attention", spec, "sm80") == "its kernels are for SM90"
    if reason is None:
        said = described("torch_attn", "sm90", spec, function="paged_attention")
        assert ([*said.configs], said.num_splits) == (["paged_attention"], 1)


LATENT = DecodeCase(
    "", (9,) * 4, 1, 128, 1, 576, 512, dtype="bfloat16", page_size=64, max_pages=128, latent=True
).spec  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"tokens": 3, "heads_q": 192, "num_splits": 2, "window_left": 999, "softcap": 2.0}, None),
        ({"cache": replace(LATENT.cache, head_dim=512, page_size=16), "cascade": True}, None),
        ({"heads_q": 32}, "its latent caches have a multiple of 64 query heads for each kv head"),
        ({"cache": replace(LATENT.cache, head_dim_v=504)},
         "its latent caches have values of 512 columns"),
        ({"has_tree": True}, "its paged attention takes no trees"),
        ({"alibi": True}, "its paged attention takes no alibi_slopes"),
        ({"cache": replace(LATENT.cache, dtype="int8")},
         "its products take float16 and bfloat16, not int8"),
        ({"cache": replace(LATENT.cache, page_size=8)},
         "its pages have a power of two of keys, at least 16"),
    ],
)  # fmt: skip
def test_latent_caches_with_many_heads_run_in_the_explicit_kernels(changes, reason):
    spec = replace(LATENT, **changes)
    for problem, operation in (
        (spec, "paged_decode"),
        (PagedSpec(**vars(spec)), "paged_attention"),
    ):
        backend, passed_over = choose("torch_attn", None, operation, problem, "sm90", True)
        assert backend == Backend(GLUON_SM90 if reason is None else TRITON, "sm90")
        assert passed_over[1:] == (() if reason is None else (f"gluon: {reason}",))
        in_jax, _ = choose("pallas_attn", None, operation, problem, "sm90", True)
        assert (in_jax.family.name == "gluon") == (reason is None)
        if reason is None:
            unsplit = replace(problem, num_splits=None)
            said = described("torch_attn", "sm90", unsplit, "gluon", operation)
            assert [*said.configs] == ["paged_decode", "combine"]
            assert said.num_splits > 1
    assert sm90.mosaic_leaves("paged_decode", LATENT) == "its head dimensions go up to 256"


def test_dq_has_a_kernel_of_its_own_where_that_is_faster():
    """Or the backward has to be deterministic. That kernel prepares the rows as well."""
    ordered = {"flash_bwd_dq", "flash_bwd_dkdv"}
    sums = {"flash_bwd_preprocess", "flash_bwd_fused", "flash_bwd_postprocess"}
    mosaic = FAMILIES["pallas_attn"][1]
    for each, head_dim, summed in (
        (GLUON_SM90, 64, 640), (GLUON_SM90, 128, 2048), (mosaic, 64, 2048), (mosaic, 128, 2048)
    ):  # fmt: skip
        for seq_kv, deterministic, kernels in (
            (summed, False, sums), (summed - 1, False, ordered), (summed, True, ordered)
        ):  # fmt: skip
            spec = replace(
                SPEC, head_dim=head_dim, head_dim_v=head_dim, seq_kv=seq_kv,
                deterministic=deterministic,
            )  # fmt: skip
            if each is mosaic:  # XLA's kernels stand around it
                kernels = kernels - {"flash_bwd_preprocess", "flash_bwd_postprocess"}
            else:
                kernels = kernels | {"flash_jvp"}
            assert Backend(each, "sm90").configs(spec).keys() == {"flash_fwd", *kernels}
    large = replace(SPEC, head_dim=256, head_dim_v=256)
    assert Backend(GLUON_SM90, "sm90").configs(large).keys() == {"flash_fwd", *ordered}


def test_a_triton_without_gluon_is_a_reason(monkeypatch):
    """Such as a version with other names: `torch_attn.kernels.explicit` looks for two each."""
    from triton.experimental.gluon import language
    from triton.experimental.gluon.language.nvidia import ampere

    monkeypatch.setattr(family, "import_error", family.import_error.__wrapped__)  # no cache

    def passed_over():
        folders = "torch_attn.kernels.sm80", "torch_attn.kernels.explicit"
        for module in [name for name in sys.modules if name.startswith(folders)]:
            monkeypatch.delitem(sys.modules, module)
        backend, (reason, _) = choice(None, "sm80")
        assert backend == Backend(TRITON, "sm80")
        return reason

    with monkeypatch.context() as patch:
        for name in ("barrier", "thread_barrier"):
            patch.delattr(language, name, raising=False)
        assert passed_over().startswith("gluon: its kernels cannot be imported: module 'triton.exp")
    monkeypatch.setitem(sys.modules, ampere.__name__, None)
    expected = "gluon: its kernels cannot be imported: import of triton.exp"
    assert passed_over().startswith(expected)


def test_a_jax_without_mosaic_gpu_is_a_reason(monkeypatch):
    """Too old by its version, without an import, or without a name."""
    mosaic, sm90, _, triton, *_ = FAMILIES["pallas_attn"]
    monkeypatch.setattr(versions, "older_jax", versions.older_jax.__wrapped__)  # no cache
    imported = []
    monkeypatch.setattr(family, "import_error", imported.append)
    monkeypatch.setattr(private, "missing", lambda group: None)
    monkeypatch.setattr(versions, "version", lambda name: {"jax": "0.11.0"}[name])
    for spec, backward in (
        (SPEC, ["flash_bwd_fused"]),
        (replace(SPEC, deterministic=True), ["flash_bwd_dq", "flash_bwd_dkdv"]),
    ):  # XLA prepares the rows of a backward
        chosen = choose("pallas_attn", None, "flash_fwd", spec, "sm80", True)
        assert chosen == (Backend(mosaic, "sm80"), ())
        said = described("pallas_attn", "sm80", spec)
        assert (said.implementation, [*said.configs]) == ("mosaic", ["flash_fwd", *backward])
    other = "mosaic: its kernels are for SM80"
    for operation in ("flash_fwd", "flash_bwd"):
        chosen = choose("pallas_attn", None, operation, SPEC, "sm90", True)
        assert chosen == (Backend(sm90, "sm90"), (other,))
    refused = "mosaic: its backward takes at least 16 keys"
    chosen = choose("pallas_attn", None, "flash_bwd", replace(SPEC, seq_kv=15), "sm90", True)
    of_pages = "mosaic: its kernels of paged caches take no other attention"
    assert chosen == (Backend(triton, "sm90"), (other, refused, of_pages))
    imported.clear()
    monkeypatch.setattr(versions, "version", lambda name: "0.9.2")
    old = "its kernels need jax 0.11 or newer, not 0.9.2"
    for target, passed_over in (
        ("sm80", (old, "its kernels are for SM90")),
        ("sm90", ("its kernels are for SM80", old)),
    ):
        reasons = (*passed_over, "its kernels of paged caches take no other attention")
        found = choose("pallas_attn", None, "flash_fwd", SPEC, target, True)
        assert found == (Backend(triton, target), tuple(f"mosaic: {x}" for x in reasons))
        refused = "; ".join(reasons)
        with pytest.raises(NotImplementedError, match=f"'mosaic': {refused}$"):
            choose("pallas_attn", "mosaic", "flash_fwd", SPEC, target, True)
    assert {*imported} == {"pallas_attn.kernels.portable.flash_fwd"}


@pytest.mark.parametrize(
    ("target", "tokens", "head_dim", "dtype", "reason"),
    [
        ("sm90", 2, 128, "bfloat16", None),
        ("sm90", 4, 64, "int8", None),
        ("sm80", 16, 64, "bfloat16", None),
        ("sm90", 3, 128, "bfloat16",
         "the portable kernels are faster above 8 query rows of a kv head in 16 bits"),
        ("sm80", 5, 128, "int8",
         "the portable kernels are faster above 16 query rows of a kv head in 8 bits"),
        ("sm90", 1, 64, "bfloat16",
         "the portable kernels are as fast with head dimensions up to 64 in 16 bits"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("importable")
def test_decodes_of_a_cache_run_in_mosaic_where_that_is_faster(
    target, tokens, head_dim, dtype, reason
):
    cache = PagedCache(3, 16, 4, 2, head_dim, head_dim, dtype)
    spec = DecodeSpec(2, tokens, 8, cache, "bfloat16", 0.125)
    backend, passed_over = choose("pallas_attn", None, "paged_decode", spec, target, True)
    assert backend.family.folder == ("portable" if reason else "paged")
    assert not reason or f"mosaic: {reason}" in passed_over
    asked_for, _ = choose("pallas_attn", "mosaic", "paged_decode", spec, target, True)
    assert asked_for.family.folder == "paged"


def test_without_a_gpu_kernels_run_in_the_interpreter_when_asked_for():
    reason = "its kernels compile for CUDA devices only"
    assert choice(None, None) == (
        Backend(REFERENCE), (f"gluon: {reason}", f"triton: {reason}"),
    )  # fmt: skip
    assert choice("triton", None) == (Backend(TRITON, interpreted=True), ())
    with pytest.raises(NotImplementedError, match=f"^implementation: .*, got 'triton': {reason}$"):
        choice("triton", None, interpretable=False)


def test_the_first_family_that_supports_the_problem_runs_it(fast):
    small, large = SPEC, AttentionSpec(1, 128, 128, 2, 2, 128, 128, "float16", 0.125)
    assert choice(None, "sm90", large) == (Backend(fast, "sm90"), ())
    assert choice(None, "sm90", small) == (Backend(TRITON, "sm90"), ("fast: head dimension 64",))
    assert choice(None, "sm80", large) == (Backend(TRITON, "sm80"), ("fast: it is for sm90",))


def test_a_name_is_a_request(fast):
    reasons = {"sm90": "head dimension 64", "sm80": "it is for sm90"}
    for target, reason in (reasons | {None: "its kernels compile for CUDA"}).items():
        with pytest.raises(NotImplementedError, match=f"^implementation: .*, got 'fast': {reason}"):
            choice("fast", target)


def test_an_explanation_names_what_was_passed_over(fast):
    said = str(described("torch_attn", "sm90", SPEC)).splitlines()
    reason = "the first that supports the problem on this device"
    assert said[:2] == [
        f"triton (compiled, sm90 code on a card): {reason}",
        "  not fast: head dimension 64",
    ]
    assert said[2].startswith("  flash_fwd: FlashConfig(")


def test_a_backward_may_be_another_familys(fast, monkeypatch):
    forward = Family("fast", "torch_attn", "sm80", covers=forward_alone)
    monkeypatch.setitem(family.FAMILIES, "torch_attn", (forward, TRITON, REFERENCE))
    assert choice(None, "sm80", operation="flash_bwd")[0] == Backend(TRITON, "sm80")
    said = described("torch_attn", "sm80", SPEC)
    assert (said.implementation, [*said.configs]) == ("fast", ["flash_fwd"])
    assert said.backward.startswith("triton (compiled, sm80 code on a card): the first")
    lines = str(said).splitlines()
    assert lines[2].startswith("  backward: triton (")
    assert lines[4].startswith("    flash_bwd_preprocess: ")
    asked = described("torch_attn", "sm80", SPEC, "fast")
    assert asked.backward.endswith("got 'fast': it has no backward")
    assert described("torch_attn", "sm80", SPEC, "triton").backward is None


@pytest.mark.parametrize("package", FAMILIES)
def test_every_family_has_every_operation(package):
    pytest.importorskip({"torch_attn": "torch", "pallas_attn": "jax"}[package])
    of_gluon = {"flash_jvp", "paged_decode"}  # on SM90
    for found in FAMILIES[package]:
        if found.name == "mosaic" and versions.older_jax() is not None:
            continue
        kernels = FAMILY_KERNELS[found.folder or "portable"]
        names = {kernel.function for kernel in kernels.values()}
        for name in names - of_gluon if (found.name, found.folder) == ("mosaic", "sm90") else names:
            assert found.function(name).__name__ == name


def test_families_of_one_name_are_tried_in_turn(fast, monkeypatch):
    other = Family("fast", "torch_attn", "sm80", covers=lambda *_: "only even days")
    monkeypatch.setitem(family.FAMILIES, "torch_attn", (other, fast, TRITON, REFERENCE))
    large = AttentionSpec(1, 128, 128, 2, 2, 128, 128, "float16", 0.125)
    assert choice("fast", "sm90", large) == (Backend(fast, "sm90"), ("fast: only even days",))
    with pytest.raises(NotImplementedError, match=r"'fast': only even days; head dimension 64$"):
        choice("fast", "sm90")


@pytest.mark.parametrize(
    ("kernel", "sizes", "uses_wgmma"),
    [
        ("flash_fwd", (64, 64), False),
        ("flash_bwd_dq", (64, 64), True),
        ("flash_bwd_dkdv", (120, 128), True),
        ("flash_bwd_dq", (64, 128), False),
    ],
)
def test_tiles_of_tf32_that_are_unlike_are_not_multiplied_by_wgmma(kernel, sizes, uses_wgmma):
    head_dim, head_dim_v = sizes
    case = FlashCase("", 1, 64, 64, 2, 2, head_dim, head_dim_v, "float32", precision="tf32")
    assert sm90.portable_uses_wgmma(kernel, case.spec) == uses_wgmma
    assert sm90.portable_uses_wgmma(kernel, replace(case.spec, precision="ieee"))


SHORT = {"batch": 32, "seq_q": 512, "seq_kv": 512}


@pytest.mark.parametrize(
    ("operation", "changes", "expected"),
    [
        ("flash_fwd", {"num_sequences": 12, "head_dim": 64}, "gluon"),
        ("flash_fwd", {"num_sequences": 12}, "gluon"),
        ("flash_fwd", {"num_sequences": 12, "head_dim": 256}, "mosaic"),
        ("flash_bwd", {"num_sequences": 12}, "gluon"),
        ("flash_bwd", {"num_sequences": 12, "deterministic": True}, "mosaic"),
        ("flash_bwd", {"num_sequences": 12, "head_dim": 256}, "gluon"),
        # Short: the host would take longer than the device.
        ("flash_bwd", {"num_sequences": 12, "seq_q": 600, "seq_kv": 600}, "mosaic"),
        ("flash_bwd", {}, "mosaic"),
        ("flash_bwd", SHORT, "gluon"),
        ("flash_bwd", SHORT | {"head_dim": 96}, "gluon"),
        ("flash_bwd", SHORT | {"head_dim": 64}, "gluon"),
        ("flash_bwd", {"head_dim": 64, "window": Window(None, 0)}, "gluon"),
        ("flash_bwd", {"window": Window(None, 0)}, "gluon"),
        ("flash_bwd", {"window": Window(None, 0), "heads_kv": 4}, "mosaic"),
        ("flash_bwd", SHORT | {"deterministic": True}, "mosaic"),
        ("flash_bwd", SHORT | {"softcap": 9.0}, "mosaic"),
        ("flash_bwd", SHORT | {"window": Window(99, 0)}, "mosaic"),
        ("flash_bwd", SHORT | {"batch": 1, "heads_q": 1, "heads_kv": 1}, "mosaic"),
        ("flash_bwd", {"head_dim": 256, "window": Window(None, 0)}, "gluon"),
        ("flash_bwd", {"head_dim": 256}, "gluon"),
        ("flash_fwd", SHORT, "mosaic"),
        ("flash_fwd", {"segmented": True}, "gluon"),
        ("flash_bwd", {"tree": True}, "gluon"),
        ("flash_bwd", {"ranges": 2}, "gluon"),
        ("flash_fwd", {"tree": True, "num_sequences": 12}, "gluon"),
        ("flash_fwd", {"segmented": True, "head_dim": 64}, "gluon"),
        ("flash_bwd", {"tree": True, "deterministic": True}, "triton"),
        ("flash_fwd", {"tree": True, "depths": True}, "gluon"),
        ("flash_fwd", {"segmented": True, "seq_q": 600, "seq_kv": 600}, "triton"),
    ],
)
@pytest.mark.usefixtures("importable")
def test_none_takes_kernels_of_the_other_side_where_they_are_faster(
    operation, changes, expected, monkeypatch
):
    fields = {"seq_q": 32768, "seq_kv": 32768, "heads_q": 16, "heads_kv": 16, "head_dim": 128}
    fields |= {"batch": 1, "dtype": "bfloat16", "scale": 0.1} | changes
    fields["head_dim_v"] = fields["head_dim"]
    spec = (VarlenSpec if "num_sequences" in fields else AttentionSpec)(**fields)
    backend, passed_over = choose("pallas_attn", None, operation, spec, "sm90", True)
    assert backend.family.name == expected
    assert backend.family.is_foreign == (expected == "gluon")
    said = describe(None, operation, backend, passed_over, spec, "a card", 132)
    assert ("as fast as this side's own" in said.reason) == (expected == "gluon")
    assert ("torch_triton" in said.by_name) == (operation == "flash_fwd")
    assert said.foreign == ("torch_attn" if expected == "gluon" else None)
    own = "triton" if spec.hides_by_data else "mosaic"
    backend, _ = choose("pallas_attn", None, operation, spec, "sm80", True)
    assert backend.family.name == own
    monkeypatch.setattr(in_jax, "find_spec", lambda name: None)
    backend, passed_over = choose("pallas_attn", None, operation, spec, "sm90", True)
    assert backend.family.name in ("mosaic", "triton")
    assert any("gluon: triton is not installed" in x for x in passed_over) == (expected == "gluon")


def test_none_takes_kernels_of_the_other_side_where_its_own_are_missing(monkeypatch):
    reasons = {"triton": "JAX has no lowering of them"}
    monkeypatch.setattr(private, "missing", reasons.get)
    monkeypatch.setattr(family, "import_error", lambda module: None)
    spec = replace(SPEC, dtype="float32")
    backend, passed_over = choose("pallas_attn", None, "flash_fwd", spec, "sm80", True)
    assert (backend.family.name, backend.family.is_foreign) == ("torch_triton", True)
    assert "triton: JAX has no lowering of them" in passed_over
    backend, _ = choose("pallas_attn", None, "flash_fwd", spec, None, True)
    assert backend.family.name == "reference"
