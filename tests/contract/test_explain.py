from twin_attention.contract.explain import Explanation
from twin_attention.targets.kernels import FlashConfig


def test_an_explanation_without_kernels_is_one_line():
    explanation = Explanation("reference", "framework", "cpu", None, "a CPU has no kernels")
    assert str(explanation) == "reference (framework, cpu): a CPU has no kernels"


def test_compiled_kernels_name_their_target_and_configurations():
    explanation = Explanation(
        "triton", "compiled", "NVIDIA H200", "sm80", "asked for by name",
        {"flash_fwd": FlashConfig(128, 64, 4, 3)},
    )  # fmt: skip
    assert str(explanation).splitlines() == [
        "triton (compiled, sm80 code on NVIDIA H200): asked for by name",
        "  flash_fwd: FlashConfig(block_q=128, block_kv=64, num_warps=4, num_stages=3)",
    ]
