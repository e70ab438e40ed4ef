import pytest

from twin_attention.contract.operands import (
    AppendOperands,
    DecodeOperands,
    FlashOperands,
    PagedOperands,
    VarlenOperands,
    describe_operands,
)


@pytest.mark.parametrize(
    "cls", [FlashOperands, VarlenOperands, DecodeOperands, PagedOperands, AppendOperands]
)
def test_each_operand_is_described_by_its_name(cls):
    operands = cls(*range(len(cls._fields)))
    got = describe_operands(operands, lambda name, x: (name, x))
    assert type(got) is cls
    assert got._asdict() == {name: (name, i) for i, name in enumerate(cls._fields)}


def test_only_an_operand_that_may_be_left_out_stays_none():
    got = describe_operands(
        DecodeOperands(None, 1, 2, 3, 4, k_scale=5), lambda *described: described
    )
    assert (got.q, got.sinks, got.k_scale) == (("q", None), None, ("k_scale", 5))
