"""Flash attention, backward, for SM90: the formulas of `torch_attn.kernels.portable.flash_bwd`.

dq has its own kernel, which also prepares the rows and makes the same bits every time, with seven
products in all. Or the kernel of dk and dv adds it up in float32, in any order, with five. Above
head size 128 one gradient's accumulator fills the registers: dq, dk and dv each have a kernel, with
eight. Shah et al. 2024, FlashAttention-3, appendix B.
"""

from dataclasses import replace

import torch
from torch import Tensor

from torch_attn.kernels.explicit.items import has_unknown_lengths, heads_at_a_time, item_counter
from torch_attn.kernels.explicit.sections import PIECE, heads_with_sums, unfinished_sections
from torch_attn.kernels.flash_bwd_terms import relative_gradient
from torch_attn.kernels.gradients import (
    BackwardKernels,
    Computation,
    Fused,
    OwnPasses,
    make_flash_bwd,
    prepare_postprocess,
)
from torch_attn.kernels.library.sequences import num_padded_rows
from torch_attn.kernels.preprocess import Statistics
from torch_attn.kernels.sm90.flash_bwd_bias import pairs_gradient
from torch_attn.kernels.sm90.flash_bwd_dkdv import flash_bwd_dkdv_kernel, prepare_dkdv
from torch_attn.kernels.sm90.flash_bwd_dq import flash_bwd_dq_kernel, prepare_dq
from torch_attn.kernels.sm90.flash_bwd_large import flash_bwd_large_kernel, prepare_dk, prepare_dv
from torch_attn.kernels.sm90.queries import items_of_keys
from torch_attn.kernels.sm90.sums import flash_bwd_postprocess_kernel, sum_columns
from torch_attn.kernels.tile_lists import listed_mask
from torch_attn.targets import num_sms
from twin_attention.contract.operands import AttentionOperands
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.family import Backend, portable_backend
from twin_attention.targets.sm90 import first_columns, has_large_heads
from twin_attention.targets.steps import keys_of_query

# One consumer; Triton adds the other partitions' warps.
NUM_WARPS = 4

# The most columns of q and v that leave shared memory for dq and a tile of a bias.
COLUMNS_BESIDE_BIAS = 224
# How much of the L2 cache the sums of the heads being computed may take.
SECTION_BYTES = 24 * 2**20
# The same for the sums of one head, where lengths of tiles are unknown.
HEAD_BYTES = 40 * 2**20
# With this many keys, a query's products take longer than one warp takes to prepare its row.
KEYS_BESIDE_ROWS = 1000
# Fewer items a program end unevenly by sections of few heads, if lengths are unknown.
ITEMS_OF_SECTIONS = 24


def _own_passes(
    spec: AttentionSpec, backend: Backend, device: torch.device, members: int
) -> OwnPasses:
    columns = sum_columns(spec.head_dim)
    if "bias" in spec.terms and columns + sum_columns(spec.head_dim_v) > COLUMNS_BESIDE_BIAS:
        return OwnPasses()
    steps, heads = items_of_keys(spec, backend.configs(spec)["flash_bwd_fused"], members)
    programs = min(len(steps) * heads, num_sms(device, backend.target))
    together = heads_at_a_time(spec, steps, heads, programs, is_counted=True, has_sections=True)
    is_unknown = has_unknown_lengths(spec)
    is_wide = is_unknown and columns > 64
    if is_wide and len(steps) * heads < ITEMS_OF_SECTIONS * programs:
        return OwnPasses()
    most = HEAD_BYTES if is_unknown and together == 1 else SECTION_BYTES
    sums = 4 * together * members * num_padded_rows(spec) * columns <= most
    # One warp prepares these too slowly.
    has_slow_rows = spec.segmented or spec.terms or is_wide
    beside_rows = not has_slow_rows and keys_of_query(spec) >= KEYS_BESIDE_ROWS
    pieces = members * (num_padded_rows(spec) // PIECE.value)
    unfinished = unfinished_sections(is_unknown)
    with_sums = heads_with_sums(together, heads, len(steps), pieces, programs, unfinished)
    return OwnPasses(sums, sums and beside_rows, members * with_sums)


def _prepared_rows(x: Computation) -> tuple[Tensor, Statistics]:
    """Prepare the rows in the portable kernel: 64 rows of dq do not fill a padded tile of them."""
    replace(x, backend=portable_backend("torch_attn", x.backend.target)).prepare_rows()
    return x.out, x.statistics._replace(lse=None)


_SMALL = BackwardKernels(
    dq=(flash_bwd_dq_kernel, prepare_dq),
    dkdv=((flash_bwd_dkdv_kernel, prepare_dkdv),),
    fused=Fused(
        (flash_bwd_postprocess_kernel, prepare_postprocess),
        sum_columns,
        splits=True,
        own_passes=_own_passes,
    ),
    rows_of_dq=lambda x: (x.out, x.statistics),
    terms_gradients=(pairs_gradient, relative_gradient),
    item_counter=item_counter,
    mask_of=listed_mask,
    num_warps=NUM_WARPS,
)
_LARGE_DKDV = (flash_bwd_large_kernel, prepare_dk), (flash_bwd_large_kernel, prepare_dv)
_flash_bwd_small = make_flash_bwd(_SMALL)
_LARGE = _SMALL._replace(dkdv=_LARGE_DKDV, fused=None)
_flash_bwd_large = make_flash_bwd(_LARGE)
_flash_bwd_halves = make_flash_bwd(_LARGE._replace(rows_of_dq=_prepared_rows))


def flash_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    operands: AttentionOperands[Tensor],
    out: Tensor,
    lse: Tensor,
    rest: Tensor | None,
    spec: AttentionSpec,
    backend: Backend,
) -> AttentionOperands[Tensor]:
    run = _flash_bwd_large if has_large_heads(spec) else _flash_bwd_small
    if spec.is_packed and first_columns(spec.head_dim) < spec.head_dim:
        run = _flash_bwd_halves
    return run(dout, dlse, operands, out, lse, rest, spec, backend)
