"""Counts in device memory by which programs tell each other what they have done.

Loads and TMA behind a wait see what was written before the reports.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_COUNT = (
    "bar.warp.sync 0xffffffff; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; "
    "@first red.{order}.gpu.global.add.s32 [$1], 1; mov.u32 $0, 0; }"
)
# TMA's stores are complete, not only read, and other programs see all stores of the warp.
REPORT = gl.constexpr(
    "{ .reg .pred first; .reg .u32 lane; cp.async.bulk.wait_group 0; fence.proxy.async.global; "
    + _COUNT.replace("{order}", "release")
)
# Complete loads need no release, which would take as long as a round trip to memory.
REPORT_READ = gl.constexpr(
    "{ .reg .pred first; .reg .u32 lane; " + _COUNT.replace("{order}", "relaxed")
)
AWAIT_REPORTS = gl.constexpr(
    "{ .reg .pred missing; .reg .s32 count; again: ld.acquire.gpu.global.s32 count, [$1]; "
    "setp.lt.s32 missing, count, $2; @missing bra again; fence.proxy.async.global; mov.u32 $0, 0; }"
)


@gluon.jit
def report(count_ptr):
    """Add 1 after all that a one-warp partition has written."""
    gl.inline_asm_elementwise(
        REPORT, "=r,l,~{memory}", [count_ptr], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def report_read(count_ptr):
    """Add 1 after all loads that a one-warp partition has waited for."""
    gl.inline_asm_elementwise(
        REPORT_READ, "=r,l,~{memory}", [count_ptr], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def await_reports(count_ptr, count):
    gl.inline_asm_elementwise(
        AWAIT_REPORTS, "=r,l,r,~{memory}", [count_ptr, count], dtype=gl.int32, is_pure=False, pack=1
    )
