from examples import check_a_kernel


def test_every_fault_is_found_and_the_kernel_without_one_passes():
    assert check_a_kernel.main(seconds=2) == 0
