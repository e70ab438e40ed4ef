from collections import Counter

import pytest

from twin_attention.contract.operands import (
    AppendOperands,
    BlockSparseOperands,
    DecodeOperands,
    FlashOperands,
    PagedOperands,
    VarlenOperands,
)
from twin_attention.contract.paged_spec import (
    DECODE_DTYPES,
    QUANTIZED_DTYPES,
    SPLITS_MAX,
    TOKENS_MAX,
)
from twin_attention.contract.spec import DTYPES
from twin_attention.contract.validate.attention import (
    check_flash_attention,
    check_flash_attention_varlen,
)
from twin_attention.contract.validate.block_mask import (
    check_block_sparse_attention,
    check_kept_tiles,
)
from twin_attention.contract.validate.dilated import check_dilated_attention, check_dilations
from twin_attention.contract.validate.merge import check_merge_states
from twin_attention.contract.validate.operands import Operand
from twin_attention.contract.validate.options import (
    check_attention_options,
    check_decode_options,
    check_flash_options,
    check_paged_options,
)
from twin_attention.contract.validate.paged import (
    check_append_kv,
    check_paged_attention,
    check_paged_decode,
)
from twin_attention.interop.parity.cases import (
    AppendCase,
    BlockSparseCase,
    DecodeCase,
    DilatedCase,
    FlashCase,
    MergeCase,
    PagedCase,
    VarlenCase,
)
from twin_attention.interop.parity.inputs import bias_shape
from twin_attention.interop.parity.ranges import KINDS as RANGES
from twin_attention.interop.parity.suites.append import append_cases
from twin_attention.interop.parity.suites.block_sparse import block_sparse_cases
from twin_attention.interop.parity.suites.choose import QUICK, SUITES
from twin_attention.interop.parity.suites.decode import decode_cases
from twin_attention.interop.parity.suites.flash import flash_cases
from twin_attention.interop.parity.suites.kinds import KINDS
from twin_attention.interop.parity.suites.paged import paged_cases
from twin_attention.targets.config import PACKAGES, find_configs, load_table, table_path
from twin_attention.targets.target import TARGETS

of_all_kinds = pytest.mark.parametrize("cases", KINDS)


def every(cases):
    return [case for suite in ("full", "large") for case in cases(suite)]


@pytest.mark.parametrize("suite", SUITES)
def test_names_are_unique(suite):
    names = Counter(case.name for cases in KINDS for case in cases(suite))
    assert not [name for name, n in names.items() if n > 1]
    assert suite != "quick" or names.keys() == set(QUICK)


@of_all_kinds
def test_suites_contain_each_other(cases):
    assert set() < set(cases("quick")) <= set(cases("small")) < set(cases("full"))


@of_all_kinds
def test_an_unknown_suite_is_an_error(cases):
    with pytest.raises(KeyError, match="huge"):
        cases("huge")


@of_all_kinds
def test_a_pattern_selects_by_name(cases):
    chosen = cases("full", "bf16")
    assert chosen
    assert chosen == [case for case in cases("full") if "bf16" in case.name]


def qkv(case):
    return [Operand(n, shape, case.dtype) for n, shape in zip("qkv", case.shapes, strict=True)]


def checked(case):
    defaults = {"return_row_max": False, "dropout_rate": 0.0}
    return check_attention_options(**defaults | case.options, return_lse=True)


def tree_of(case, of_queries: tuple[int, ...], of_keys: tuple[int, ...]) -> dict[str, Operand]:
    shapes = {"kv_ends": of_keys} if case.tree else {}
    if case.depths:
        shapes |= {"q_depths": of_queries, "kv_depths": of_keys}
    if case.ranges:
        shapes["q_ranges"] = (*of_queries, RANGES[case.ranges], 2)
    return {name: Operand(name, shape, "int32") for name, shape in shapes.items()}


def terms_of(case, batch: int) -> dict[str, Operand]:
    terms, heads = {}, case.heads_q
    if case.relative is not None:
        dtype = case.dtype if case.terms_in_q_dtype else "float32"
        terms["relative_bias"] = Operand("relative_bias", (heads, 2 * case.relative + 1), dtype)
    if case.alibi:
        shape = (heads,) if case.alibi == "heads" else (batch, heads)
        terms["alibi_slopes"] = Operand("alibi_slopes", shape, "float32")
    if getattr(case, "bias", None) is not None:
        dtype = case.dtype if case.terms_in_q_dtype else "float32"
        terms["bias"] = Operand("bias", bias_shape(case), dtype)
    if case.dropout_rate:
        terms["dropout_seed"] = Operand("dropout_seed", (2,), "int32")
    return terms


def of_flash(case: FlashCase):
    operands = FlashOperands(
        *qkv(case),
        Operand("sinks", (case.heads_q,), "float32") if case.sinks else None,
        *(
            Operand(f"{name}_segment_ids", shape[:2], "int32") if case.segments else None
            for name, shape in zip(("q", "kv"), case.shapes, strict=False)
        ),
        **tree_of(case, *(shape[:2] for shape in case.shapes[:2])),
        **terms_of(case, case.batch),
    )
    return check_flash_attention(operands, checked(case))


def of_varlen(case: VarlenCase):
    spec, offsets = case.spec, (len(case.lengths) + 1,)
    operands = VarlenOperands(
        Operand("q", (spec.seq_q, spec.heads_q, spec.head_dim), case.dtype),
        Operand("k", (spec.seq_kv, spec.heads_kv, spec.head_dim), case.dtype),
        Operand("v", (spec.seq_kv, spec.heads_kv, spec.head_dim_v), case.dtype),
        Operand("cu_seqlens_q", offsets, "int32"),
        Operand("cu_seqlens_kv", offsets, "int32"),
        **tree_of(case, (spec.seq_q,), (spec.seq_kv,)),
        **terms_of(case, spec.num_sequences),
    )
    return check_flash_attention_varlen(operands, checked(case))


def of_block_sparse(case: BlockSparseCase):
    options, mask = check_flash_options(**case.options, return_lse=True), case.mask_shape
    q, k, v = qkv(case)
    check_kept_tiles(Operand("block_mask", mask, "bool"), q, k)
    *masks, tiles_q, tiles_kv = mask
    lists = {
        "kv_counts": (*masks, tiles_q), "kv_tiles": (*masks, tiles_q, tiles_kv),
        "q_counts": (*masks, tiles_kv), "q_tiles": (*masks, tiles_kv, tiles_q),
    }  # fmt: skip
    operands = BlockSparseOperands(
        q, k, v, *(Operand(name, shape, "int32") for name, shape in lists.items()),
        sinks=Operand("sinks", (case.heads_q,), "float32") if case.sinks else None,
    )  # fmt: skip
    return check_block_sparse_attention(operands, options)


def of_dilated(case: DilatedCase):
    options = dict(case.options)
    dilations = check_dilations(options.pop("segment_lengths"), options.pop("dilation_rates"))
    options = check_flash_options(**options, window_size=None, return_lse=True)
    return check_dilated_attention(FlashOperands(*qkv(case)), dilations, options)


def of_merge(case: MergeCase):
    rows = case.num_states, case.batch
    outs = Operand("outs", (*rows, case.tokens, case.heads, case.head_dim_v), case.dtype)
    return check_merge_states(outs, Operand("lses", (*rows, case.heads, case.tokens), "float32"))


def cached(case, **others) -> dict[str, Operand]:
    cache, batch = case.spec.cache, case.spec.batch
    pool = (cache.num_pages, cache.page_size, cache.heads)
    scale = (case.scale_shape, "float32") if cache.is_quantized else None
    described = others | {
        "k_pages": ((*pool, cache.head_dim), cache.dtype),
        "v_pages": None if cache.latent else ((*pool, cache.head_dim_v), cache.dtype),
        "block_tables": ((batch, cache.max_pages), "int32"),
        "seq_lens": ((batch,), "int32"),
        "k_scale": scale,
        "v_scale": None if cache.latent else scale,
    }
    return {name: None if x is None else Operand(name, *x) for name, x in described.items()}


def slopes_of(case):
    shape = (case.heads_q,) if case.alibi == "heads" else (case.spec.batch, case.heads_q)
    return (shape, "float32") if case.alibi else None


def of_decode(case: DecodeCase):
    spec = case.spec
    tokens = () if case.tokens is None else (case.tokens,)
    operands = cached(
        case,
        q=((spec.batch, *tokens, spec.heads_q, spec.head_dim), case.dtype),
        sinks=((spec.heads_q,), "float32") if case.sinks else None,
        tree_ends=((spec.batch, spec.tokens), "int32") if case.tree else None,
        alibi_slopes=slopes_of(case),
    )
    options = check_decode_options(True, **case.options, return_lse=True)
    return check_paged_decode(DecodeOperands(**operands), options)


def of_paged(case: PagedCase):
    spec = case.spec
    operands = cached(
        case,
        q=((spec.tokens, spec.heads_q, spec.head_dim), case.dtype),
        cu_seqlens_q=((len(case.new_tokens) + 1,), "int32"),
        sinks=((spec.heads_q,), "float32") if case.sinks else None,
        tree_ends=((spec.tokens,), "int32") if case.tree else None,
        alibi_slopes=slopes_of(case),
        q_ranges=((spec.tokens, spec.ranges, 2), "int32") if case.ranges else None,
    )
    options = check_paged_options(True, **case.options, return_lse=True)
    return check_paged_attention(PagedOperands(**operands), options)


def of_append(case: AppendCase):
    spec, cache = case.spec, case.spec.cache
    rows = (spec.tokens,) if spec.packed else (spec.batch, spec.tokens)
    rotation = ((case.positions, case.rotary_dim // 2), "float32") if case.rotary_dim else None
    operands = cached(
        case,
        k_new=((*rows, cache.heads, cache.head_dim), case.dtype),
        v_new=None if cache.latent else ((*rows, cache.heads, cache.head_dim_v), case.dtype),
        cu_seqlens_q=((spec.batch + 1,), "int32") if spec.packed else None,
        q=((*rows, case.heads_q, cache.head_dim), case.dtype) if case.heads_q else None,
        rotary_cos=rotation,
        rotary_sin=rotation,
    )
    return check_append_kv(AppendOperands(**operands), case.rotary_interleaved)


DESCRIBED = {
    FlashCase: of_flash, VarlenCase: of_varlen, BlockSparseCase: of_block_sparse,
    DilatedCase: of_dilated, DecodeCase: of_decode, PagedCase: of_paged, AppendCase: of_append,
    MergeCase: of_merge,
}  # fmt: skip


@of_all_kinds
def test_a_case_describes_the_call_that_validation_accepts(cases):
    for case in every(cases):
        if describe := DESCRIBED.get(type(case)):
            assert describe(case) == case.spec, case.name


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("package", PACKAGES)
def test_the_full_suite_reaches_every_configuration(package, target):
    path = table_path(package, target)
    reached = set()
    kinds = (flash_cases, block_sparse_cases, decode_cases, paged_cases, append_cases)
    for case in [case for cases in kinds for case in cases("full")]:
        specs = [case.spec]
        if isinstance(case, DecodeCase):
            specs += [case.spec.merge(2)]
        reached |= {id(config) for spec in specs for config in find_configs(path, spec).values()}
    # Of rows with the same key, cards of less shared memory take the others.
    first = {
        (kernel, row.key): row
        for kernel, rows in load_table(path, "portable").items()
        for row in reversed(rows)
    }
    rows = [(kernel, row) for (kernel, _), row in first.items()]
    assert not [(kernel, row) for kernel, row in rows if id(row.config) not in reached]


@pytest.mark.parametrize("suite", ["quick", "full"])
def test_suites_cover_every_option(suite):
    cases = flash_cases(suite)
    assert {case.dtype for case in cases} == set(DTYPES)
    assert any(case.heads_q > case.heads_kv > 1 for case in cases)
    assert any(case.heads_q > case.heads_kv == 1 for case in cases)
    assert any(case.seq_q > case.seq_kv > 0 and case.causal for case in cases)
    assert any(0 < case.seq_q < case.seq_kv and case.causal for case in cases)
    assert any(case.shapes[0][3] != case.shapes[2][3] for case in cases)
    assert any(case.softcap and case.window_size and case.causal for case in flash_cases("quick"))
    assert any(case.layout == "strided" for case in cases)
    assert {case.segments for case in cases} == {"", "documents", "shuffled"}
    assert {"", "any"} <= {case.ranges for case in cases}
    assert any(case.scale is not None for case in cases)
    assert any(case.spec.is_empty for case in cases)


def test_a_large_case_passes_two_to_the_31_elements():
    sizes = [
        batch * seq * heads * size
        for case in flash_cases("large")
        for batch, seq, heads, size in case.shapes
    ]
    assert max(sizes) > 2**31


def test_a_strided_case_has_tensors_that_can_be_packed():
    """q, k and v are slices of one tensor along its heads, so all else must agree."""
    strided = [case for case in every(flash_cases) if case.layout == "strided"]
    assert strided
    for case in strided:
        assert len({(b, s, d) for b, s, _, d in case.shapes}) == 1


@pytest.mark.parametrize("cases", [decode_cases, paged_cases])
def test_a_decode_case_has_room_for_its_sequences(cases):
    for case in every(cases):
        cache = case.spec.cache
        assert max(case.lengths, default=0) <= cache.capacity or case.spec.is_empty, case.name
        assert cache.num_pages > len(case.lengths) * cache.max_pages, case.name


@pytest.mark.parametrize("suite", ["quick", "full"])
def test_suites_cover_every_option_of_a_decode(suite):
    cases = decode_cases(suite)
    assert {case.dtype for case in cases} == set(DECODE_DTYPES)
    assert {case.kv_dtype for case in cases} == {None, *QUANTIZED_DTYPES}
    assert {len(case.scale_shape) for case in cases if case.kv_dtype} == {0, 1}
    assert {case.tokens is None for case in cases} == {False, True}
    assert {None, 1} < {case.num_splits for case in cases}
    assert any(case.page_size & (case.page_size - 1) for case in cases)
    assert any(case.spec.group_size == 1 for case in cases)
    assert any(case.head_dim != case.spec.head_dim_v for case in cases)
    assert any(case.sinks and case.softcap and case.window_size and case.scale for case in cases)
    assert any(case.tree for case in cases)
    assert any(case.spec.is_empty for case in cases)


def test_a_decode_has_lengths_around_a_pages_end():
    (case,) = decode_cases("small", "decode-bf16")
    size = case.page_size
    assert {0, 1, size - 1, size, size + 1, case.spec.cache.capacity} == set(case.lengths)


def test_the_full_suite_reaches_the_limits_of_a_decode():
    cases = decode_cases("full")
    assert {case.tokens for case in cases} >= {1, TOKENS_MAX}
    assert {case.page_size for case in cases} >= {1, 256}
    assert max(case.num_splits or 1 for case in cases) <= SPLITS_MAX


def test_a_large_decode_passes_two_to_the_31_elements():
    caches = [case.spec.cache for case in decode_cases("large")]
    assert max(c.num_pages * c.page_size * c.heads * c.head_dim for c in caches) > 2**31
