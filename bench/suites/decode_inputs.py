"""Make the tensors of a decode: a paged cache, and a dense copy for peers without pages."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property, partial

from torch import Tensor
from torch.nn.functional import pad

from interop.parity.cases import DecodeCase
from interop.parity.inputs import make_inputs

NO_PAGE = -1


@dataclass(frozen=True)
class DecodeTensors:
    """Arguments of a `paged_decode` or `paged_attention`, as `interop.parity.inputs` makes them.

    Attributes:
        q: [B, T, Hq, D], of a `paged_attention` [Tq, Hq, D].
        k_pages, v_pages: [P, page_size, Hkv, D]. The sequences' pages lie in random order; pages
            and slots that no sequence uses hold NaN.
        block_tables: [B, max_pages] int32; past a sequence's last page it holds no page's id.
        seq_lens: [B] int32.
        k_scale, v_scale: of a quantised cache, [] or [Hkv] float32; else None.
        cu_seqlens_q: of a `paged_attention`, [B + 1] int32; else None.
    """

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    cu_seqlens_q: Tensor | None = None

    @property
    def arguments(self) -> dict[str, Tensor]:
        """Return the tensors by argument name, without those that are None."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: x for name, x in named.items() if x is not None}

    @cached_property
    def dense(self) -> tuple[Tensor, Tensor]:
        """Return k and v [B, Skv, Hkv, D], copied out of their pages; all lengths are the same."""
        length = int(self.seq_lens[0])
        pages = self.block_tables[:, : -(-length // self.k_pages.shape[1])].long()
        k, v = (
            pool[pages].flatten(1, 2)[:, :length].contiguous()
            for pool in (self.k_pages, self.v_pages)
        )
        return k, v


def fitted(case: DecodeCase) -> DecodeCase:
    """Return the case with tables no wider than its longest sequence needs."""
    return replace(case, max_pages=-(-max(case.lengths) // case.page_size))


def decode_tensors(case: DecodeCase, device: str = "cuda") -> DecodeTensors:
    """Return the tensors of `case`; the pool does not grow with the tables' capacity."""
    needed = fitted(case)
    inputs = make_inputs(needed, device)
    fill = partial(pad, pad=(0, case.max_pages - needed.max_pages), value=NO_PAGE)
    return DecodeTensors(**inputs | {"block_tables": fill(inputs["block_tables"])})
