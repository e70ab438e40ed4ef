from __future__ import annotations

from dataclasses import replace

import pytest

from tests.oracle import poison_before
from tests.torch_attn.explicit_kernels import check_results, gluon_backend, in_turn
from tests.torch_attn.gluon_interpreter import interpreted
from twin_attention.contract.operands import DecodeOperands, PagedOperands
from twin_attention.interop.parity.cases import DecodeCase, PagedCase
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.oracle import expectations, parts_of

BACKEND = gluon_backend("sm90")
LATENT = {"heads_kv": 1, "head_dim": 576, "head_dim_v": 512, "latent": True}
DECODES = [
    DecodeCase("one token", (0, 1, 63, 64, 65, 192), heads_q=64, max_pages=12, num_splits=1, **LATENT),
]
