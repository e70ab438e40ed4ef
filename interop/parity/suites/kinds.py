"""The functions that return the cases, for all kinds of problems."""

from __future__ import annotations

from twin_attention.interop.parity.suites.append import append_cases
from twin_attention.interop.parity.suites.block_sparse import block_sparse_cases
from twin_attention.interop.parity.suites.context import context_cases
from twin_attention.interop.parity.suites.decode import decode_cases
from twin_attention.interop.parity.suites.dilated import dilated_cases
from twin_attention.interop.parity.suites.flash import flash_cases
from twin_attention.interop.parity.suites.merge import merge_cases
from twin_attention.interop.parity.suites.paged import paged_cases
from twin_attention.interop.parity.suites.varlen import varlen_cases

# The cases of each function.
KINDS = (
    flash_cases, varlen_cases, block_sparse_cases, dilated_cases, context_cases, decode_cases,
    paged_cases, append_cases, merge_cases,
)  # fmt: skip
