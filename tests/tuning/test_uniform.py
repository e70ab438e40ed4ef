"""Uniform registers that nothing wrote are found."""

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


def test_a_register_written_on_every_path_is_written():
    assert unwritten(SASS.format("UMOV UR6, URZ")) == []


def test_a_register_that_one_path_leaves_is_found():
    (found,) = unwritten(SASS.format("UMOV UR8, URZ"))
    assert "HGMMA" in found


def test_a_register_that_is_read_to_make_itself_is_found():
    (found,) = unwritten(SASS.format("UIADD3 UR6, UP0, UR6, 0x40, URZ"))
    assert "UIADD3 UR6, UP0, UR6" in found


def test_a_register_that_is_written_behind_a_predicate_is_written():
    assert unwritten(SASS.format("ULOP3.LUT UP0, UR6, UR4, 0x2, URZ, 0xc0, !UPT")) == []


def test_a_register_may_be_kept_and_copied_back_unwritten():
    code = "UMOV UR6, URZ ; /*0061*/ MOV R4, UR19 ; /*0062*/ R2UR UR19, R4"
    assert unwritten(SASS.format(code)) == []


def test_a_register_that_is_copied_back_is_as_unwritten_as_before():
    (found,) = unwritten(SASS.format("MOV R4, UR6 ; /*0061*/ R2UR UR6, R4"))
    assert "HGMMA" in found


def test_a_register_copied_from_a_result_is_written():
    code = "MOV R4, UR6 ; /*0061*/ FADD R4, R1, R2 ; /*0062*/ R2UR UR6, R4"
    assert unwritten(SASS.format(code)) == []
