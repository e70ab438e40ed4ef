from tuning.static.bounds import fixed_bounds

# A walk over runs of tiles: each run is looked for from the end of the last one.
WALK = """
    %0:2 = scf.for %i = %c0_i32 to %runs step %c1_i32 iter_args(%acc = %cst, %end = %c0_i32) {
      %1:2 = scf.for %tile = %end to %count step %c512_i32 iter_args(%first = %none) {
      %2 = scf.for %step = %c0_i32 to %size step %c1_i32 iter_args(%acc_1 = %acc) {
"""


def test_loops_that_keep_their_bounds():
    renamed = WALK.replace("%end", "%arg25").replace("%count", "%count_1")
    assert fixed_bounds(WALK, renamed) == 0


def test_a_loop_that_forgets_where_to_begin():
    assert fixed_bounds(WALK, WALK.replace("%tile = %end", "%tile = %c0_i32")) == 1


def test_loops_that_forget_where_to_begin_and_end():
    fixed = WALK.replace("%tile = %end", "%tile = %c-1_i32").replace("%size", "%c0_i32_1")
    assert fixed_bounds(WALK, fixed) == 2
