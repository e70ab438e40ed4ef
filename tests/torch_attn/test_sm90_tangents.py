from tests.torch_attn.explicit_kernels import EDGES, LISTED, check_tangents, gluon_backend, in_turn
from tests.torch_attn.test_sm90_kernels import CASES, PACKED
from twin_attention.interop.parity.cases import FlashCase

BACKEND = gluon_backend("sm90")
OTHERS = [
    FlashCase("one key", 1, 70, 1, 1, 1, 64, sinks=True),
    FlashCase("sinks and slopes", 1, 130, 140, 2, 2, 64, sinks=True, alibi="heads", causal=True),
    FlashCase("dropout", 1, 130, 140, 1, 1, 64, dropout_rate=0.3, causal=True),
]


def is_covered(case):
    return BACKEND.family.supports("flash_jvp", case.spec, "sm90") is None


@in_turn(filter(is_covered, [*CASES, *EDGES, *LISTED, *PACKED, *OTHERS]))
def test_tangents(case, mode):
    assert check_tangents(case, mode, BACKEND)[-1] == "flash_jvp"
