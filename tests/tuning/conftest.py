from tuning.static.resources import Resources

# Of a kernel that passes every check of the gate.
FIT = Resources(
    registers=128, spill_stores=0, spill_loads=0, loop_spills=0, stack=0, shared=48 * 1024, warps=4,
    occupancy=4, serialized=False, unwritten=0, overwritten=0, fixed_bounds=0, mma=64, wgmma=64,
    cp_async=16, tma=16, ldmatrix=16, ex2=64,
)  # fmt: skip
