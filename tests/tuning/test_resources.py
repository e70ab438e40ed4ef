import pytest

from tuning.static.resources import _bytes_moved, _main_loops, _spills, occupancy

SASS = """
        /*0010*/                   STL [R1+0x10], R5 ;
        /*0020*/                   STL.64 [R1], R2 ;
        /*0030*/              @!P0 STL.128 [R1+0x20], R8 ;
        /*0040*/                   LDL.LU R5, [R1+0x10] ;
        /*0050*/                   LDL.LU.64 R2, [R1] ;
        /*0060*/                   LDL.U8 R2, [R1] ;
        /*0070*/                   LDGSTS.E.BYPASS.128 [R5], [R2.64] ;
"""


def test_spills_count_the_bytes_of_each_instruction():
    assert _bytes_moved("STL", SASS) == 4 + 8 + 16
    assert _bytes_moved("LDL", SASS) == 4 + 8 + 1


LOOPS = """
        /*0010*/                   STL [R1+0x10], R5 ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0030*/                   STL.64 [R1+0x20], R2 ;
        /*0040*/              @P0 BRA 0x20 ;
        /*0050*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0060*/                   LDL R5, [R1+0x10] ;
        /*0070*/              @!P1 BRA 0x90 ;
        /*0080*/                   BRA P0, 0x50 ;
        /*0090*/                   LDL.128 R8, [R1] ;
        /*00a0*/                   BRA 0x90 ;
"""


NESTED = """
        /*0010*/                   STL [R1+0x10], R5 ;
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0030*/              @!P0 BRA 0x80 ;
        /*0040*/                   LDL R5, [R1+0x10] ;
        /*0050*/              @P0 BRA 0x20 ;
        /*0060*/                   LDL.128 R8, [R1] ;
        /*0070*/              @P1 BRA 0x10 ;
        /*0080*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0090*/                   BRA 0x40 ;
"""


@pytest.mark.parametrize(("sass", "products"), [(LOOPS, "HMMA"), (NESTED, "HGMMA")])
def test_the_main_loop_is_the_last_with_products_and_has_no_loop_in_it(sass, products):
    (loop,) = _main_loops(sass)
    assert (loop.count(products), _bytes_moved("LDL", loop), _bytes_moved("STL", loop)) == (1, 4, 0)
    assert _main_loops(SASS) == []


SPECIALIZED = """
        /*0010*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0 ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0030*/                   STL.128 [R1], R8 ;
        /*0040*/              @P0 BRA 0x20 ;
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0060*/                   STL.64 [R1], R8 ;
        /*0070*/                   LDL.64 R8, [R1] ;
        /*0080*/              @P0 BRA 0x50 ;
        /*0090*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0 ;
        /*00a0*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*00b0*/                   LDL R5, [R1+0x10] ;
        /*00c0*/              @P0 BRA 0xa0 ;
        /*00d0*/                   USETMAXREG.DEALLOC.CTAPOOL 0x18 ;
        /*00e0*/                   LDL.128 R8, [R1] ;
        /*00f0*/              @P0 BRA 0xe0 ;
"""


def test_warps_of_different_work_have_a_main_loop_each():
    assert [_spills(loop) for loop in _main_loops(SPECIALIZED)] == [16, 4]


@pytest.mark.parametrize(
    ("target", "registers", "shared", "warps", "blocks"),
    [
        ("sm80", 255, 0, 4, 2),  # registers: 4 warps of 32 * 256 in 64 Ki
        ("sm80", 32, 0, 8, 8),  # warps: 64
        ("sm80", 16, 0, 1, 32),  # blocks: 32
        ("sm80", 64, 80 * 1024, 4, 2),  # shared memory: 164 KiB, 1 KiB of it lost to each block
        ("sm80", 64, 163 * 1024, 4, 1),
        ("sm80", 64, 164 * 1024, 4, 0),
        ("sm90", 64, 75 * 1024, 4, 3),
    ],
)
def test_occupancy(target, registers, shared, warps, blocks):
    assert occupancy(target, registers, shared, warps) == blocks
