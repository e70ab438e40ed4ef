import pytest

from tuning.static.barriers import overwritten


def instruction(address, text, reads_late=7, awaits=0, writes_late=7):
    """`reads_late` and `writes_late` name a scoreboard, 7 for none; `awaits` has a bit for each."""
    upper = (1 | writes_late << 5 | reads_late << 8 | awaits << 11) << 41
    return (
        f"        /*{address:04x}*/    {text} ;    /* 0x0000000000007944 */\n"
        f"                                         /* 0x{upper:016x} */\n"
    )


def kernel(*instructions):
    lines = [
        instruction(0x00, "IMAD.U32 R9, RZ, RZ, UR4"),
        instruction(0x10, "BAR.ARV R9, 0x120", reads_late=1),
        *(instruction(0x20 + 0x10 * i, *x) for i, x in enumerate(instructions)),
    ]
    return "".join(lines)


OVERWRITES = [
    [("@!P0 FADD R9, R1, R2",)],
    [("IMAD.WIDE.U32 R8, R1, R2, RZ",)],
    [("IADD3 R9, P0, R1, R2, RZ",)],
    [("FADD R1, R1, R2", 7, 0b000100), ("FADD R9, R1, R2",)],  # another scoreboard
    [("@P0 BRA 0x40",), ("EXIT",), ("FADD R9, R1, R2",)],
]
FITS = [
    [("FADD R9, R1, R2", 7, 0b000010)],
    [("FADD R1, R1, R2", 7, 0b000010), ("FADD R9, R1, R2",)],
    [("LDG.E R9, desc[UR46][R156.64+0x4]", 7, 0, 2)],  # written late
    [("EXIT",), ("FADD R9, R1, R2",)],
    [("BRA 0x40",), ("FADD R9, R1, R2",), ("EXIT",)],
    [("STS [R9], R1",), ("ISETP.NE.AND P0, PT, R9, RZ, PT",), ("FADD R19, R9, R9",)],
    [("STG.E desc[UR46][R88.64], R9",), ("R2UR UR4, R9",), ("BAR.ARV R9, 0x120",)],
]


@pytest.mark.parametrize("instructions", OVERWRITES)
def test_a_number_that_is_overwritten_too_early_is_found(instructions):
    assert overwritten(kernel(*instructions)) == ["BAR.ARV R9, 0x120"]


@pytest.mark.parametrize("instructions", FITS)
def test_a_number_that_is_kept_until_it_is_read_is_not(instructions):
    assert overwritten(kernel(*instructions)) == []


def test_a_constant_number_is_read_at_once():
    assert overwritten(instruction(0, "BAR.ARV 0x6, 0x100") + instruction(16, "EXIT")) == []
