"""TMA's additions in Triton, which `torch_attn/kernels/explicit/reduction.py` uses.

When this fails after an update of Triton: if its language adds a box of shared memory to global
memory, import that function in `reduction.py` and delete what is private there. If not, look in
`triton/experimental/gluon/language` for how a store by TMA reaches the builder now.
"""

import pytest

tma = pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper").tma


def test_triton_adds_boxes():
    from torch_attn.kernels.explicit.reduction import add_box

    if hasattr(tma, "async_atomic_add"):
        assert add_box is tma.async_atomic_add
        return
    from triton._C.libtriton import gluon_ir, ir
    from triton.experimental.gluon.language._core import builtin

    assert callable(builtin)
    assert hasattr(gluon_ir.GluonOpBuilder, "create_async_tma_reduce")
    assert hasattr(ir.DESCRIPTOR_REDUCE_KIND, "ADD")
