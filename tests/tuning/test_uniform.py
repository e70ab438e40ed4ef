import pytest

from tuning.static.uniform import unwritten

# The address of a tile of v is computed in one of two ways, or in only one.
SASS = """
        /*0010*/                   R2UR UR4, R5 ;
        /*0020*/                   ULDC.64 UR12, c[0x0][0x208] ;
        /*0030*/              @!P0 BRA 0x60 ;
        /*0040*/                   UIADD3 UR6, UP0, UR4, 0x40, URZ ;
        /*0050*/                   BRA 0x80 ;
        /*0060*/                   {} ;
        /*0080*/                   UMOV UR7, 0x80000020 ;
        /*0090*/                   LDG.E R24, desc[UR12][R2.64] ;
        /*00a0*/                   HGMMA.64x32x16.F32 R56, R24, gdesc[UR4].tnspB, R56 ;
        /*00b0*/              @P1  BRA 0x80 ;
        /*00c0*/                   EXIT ;
"""


WRITTEN = {
    "on every path": "UMOV UR6, URZ",
    "behind a predicate": "ULOP3.LUT UP0, UR6, UR4, 0x2, URZ, 0xc0, !UPT",
    "kept and copied back unwritten": (
        "UMOV UR6, URZ ; /*0061*/ MOV R4, UR19 ; /*0062*/ R2UR UR19, R4"
    ),
    "copied from a result": "MOV R4, UR6 ; /*0061*/ FADD R4, R1, R2 ; /*0062*/ R2UR UR6, R4",
}
UNWRITTEN = {
    "UMOV UR8, URZ": "HGMMA",  # one path leaves it
    "UIADD3 UR6, UP0, UR6, 0x40, URZ": "UIADD3 UR6, UP0, UR6",  # read to make itself
    "MOV R4, UR6 ; /*0061*/ R2UR UR6, R4": "HGMMA",  # copied back as unwritten as before
}


@pytest.mark.parametrize("code", WRITTEN.values(), ids=WRITTEN)
def test_a_register_that_is_written_is_not_found(code):
    assert unwritten(SASS.format(code)) == []


@pytest.mark.parametrize(("code", "reader"), UNWRITTEN.items())
def test_a_register_that_nothing_wrote_is_found(code, reader):
    (found,) = unwritten(SASS.format(code))
    assert reader in found
