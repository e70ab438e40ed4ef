"""A forward and its backward, planned and compiled; as a program, without PyTorch and Triton."""

import sys
from unittest import mock

from twin_attention.contract.operands import FlashOperands
from twin_attention.contract.spec import AttentionSpec
from twin_attention.interop.kernels import known
from twin_attention.interop.kernels.plan import Kernel, Type
from twin_attention.targets.target import Card

ROWS, LSE = Type((1, 300, 2, 16), "bfloat16"), Type((1, 2, 300), "float32")
OPERANDS = FlashOperands(*[ROWS] * 3)
SPEC = AttentionSpec(1, 300, 300, 2, 2, 16, 16, "bfloat16", 0.25)
CARD = Card(80, 108, 163 * 1024)
FORWARD = known.Question("sm80", "flash_fwd", SPEC, "sm80", CARD, (OPERANDS,))
BACKWARD = FORWARD._replace(operation="flash_bwd", operands=(ROWS, LSE, OPERANDS, ROWS, LSE, None))


def answers():
    found = []
    for question in (FORWARD, BACKWARD):
        assert known.refusal(*question[:4]) is None
        plan = known.plan_of(question)
        for x in plan.steps:
            if isinstance(x, Kernel):
                found += [x[1:], known.kernel_of(x.code, x.written, x.zeroed)]
            else:
                found.append(x)
        found.append(plan.results)
    return repr(found)


if __name__ == "__main__":
    sys.modules["torch"] = sys.modules["triton"] = None  # type: ignore[assignment]
    with mock.patch.object(known, "cuda_devices", return_value=("a GPU",)):
        print(answers())
