from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch._C._dynamo.guards import _empty_strided_cpu

from torch_attn import private
from torch_attn.kernels.flash_bwd_terms import sums_of_distances
from torch_attn.launch import tensors_of
from torch_attn.replay import capture, current_capture
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.bands import bands_of


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setattr(private, "empty_strided_cuda", _empty_strided_cpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(private, "get_device", lambda: 0)
    monkeypatch.setattr(private, "get_stream", lambda index: 5)


class Kernel:
    def __init__(self):
        self.launches = []

    def __call__(self, *operands):
        current_capture().add(self.launch, tensors_of(operands))

    def launch(self, stream, addresses):
        assert stream == 5
        self.launches.append(addresses)


def pointers(*tensors):
    return tuple(x.data_ptr() for x in tensors)


def steps_of(again):
    return [x for x in again.__code__.co_names if x.startswith(("layout", "launch", "operation"))]


def test_results_are_allocated_and_operands_are_those_of_the_call():
    kernel = Kernel()

    def host(x, y, left_out):
        out = x.new_empty((3, 2), dtype=torch.float32)
        kernel(x, left_out, y, out)
        return out, None

    x, y = torch.ones(4, dtype=torch.float16), torch.ones(5)
    first, again = capture(host, (x, y, None))
    results = [again(x, y, None), again(y, x, None)]
    assert kernel.launches == [
        pointers(x, y, results[0][0]), pointers(y, x, results[1][0])
    ]  # fmt: skip
    for out, nothing in [first, *results]:
        assert nothing is None
        assert (out.shape, out.stride(), out.dtype) == ((3, 2), (2, 1), torch.float32)
    assert len(set(pointers(first[0], results[0][0], results[1][0]))) == 3


def test_one_tensor_as_two_operands_stands_for_two():
    kernel, (x, y) = Kernel(), torch.ones(2, 4)
    _, again = capture(lambda x, y: kernel(x, y), (x, x))
    assert again(x, y) is None
    assert kernel.launches == [pointers(x, y)]


def test_buffers_that_only_kernels_see_are_one_allocation(monkeypatch):
    made = []

    def allocate(*layout):
        made.append(_empty_strided_cpu(*layout))
        return made[-1]

    kernel = Kernel()

    def host(x):
        rows, sums = x.new_empty(3), x.new_empty((5, 100), dtype=torch.float64)
        kernel(x, rows, sums)
        return (x.new_empty(1),)

    monkeypatch.setattr(private, "empty_strided_cuda", allocate)
    x = torch.ones(4)
    _, again = capture(host, (x,))
    again(x)
    assert [y.nbytes for y in made] == [4, 256 + 4096]
    assert kernel.launches == [(x.data_ptr(), made[1].data_ptr(), made[1].data_ptr() + 256)]


def test_views_that_only_kernels_read_are_not_made(monkeypatch):
    kernel = Kernel()

    def host(x):
        out = x.new_empty((2, 1, 3))
        kernel(x.unsqueeze(1).view(torch.int32), out)
        return out.squeeze(1), None

    x = torch.ones(4)
    _, again = capture(host, (x,))
    assert steps_of(again) == ["layout0", "launch0"]
    out, _ = again(x)
    assert (out.shape, out.stride()) == ((2, 3), (3, 1))
    assert kernel.launches == [pointers(x, out)]


def test_operations_of_torch_are_repeated_in_their_place():
    def fill(stream, addresses):
        order.append("kernel")

    order = []

    def host(x, y):
        sums = x.new_empty(4).zero_()
        current_capture().add(fill, (x, sums))
        product = x[1:] * y.unsqueeze(0)
        return sums, -product.sum((0,))

    x, y = torch.arange(5.0), torch.tensor(3.0)
    first, again = capture(host, (x, y))
    for a, b in ((x, y), (x + 1, y * 2)):
        sums, total = again(a, b)
        assert torch.equal(sums, torch.zeros(4))
        assert torch.equal(total, -(a[1:] * b).sum((0,)))
    assert torch.equal(first[1], torch.tensor(-30.0))
    assert order == ["kernel"] * 2


def test_nothing_of_the_first_call_is_kept_alive():
    import gc
    import weakref

    def host(x):
        y = x.new_empty(4).zero_()
        return (y + x,)

    x = torch.ones(4)
    first, again = capture(host, (x,))
    alive = weakref.ref(x), weakref.ref(first[0])
    del x, first
    gc.collect()
    assert [y() for y in alive] == [None, None]
    assert torch.equal(again(torch.ones(4))[0], torch.ones(4))


def test_a_tensor_from_elsewhere_is_refused():
    kernel, other = Kernel(), torch.ones(2)
    with pytest.raises(AssertionError, match="neither an operand"):
        capture(lambda x: kernel(x, other), (torch.ones(2),))


def test_threads_that_capture_at_once_see_their_own_steps():
    together = Barrier(4)

    def work():
        kernel, x = Kernel(), torch.ones(4)

        def host(x):
            together.wait(30)
            out = x.new_empty(4)
            together.wait(30)
            kernel(x, out)
            return (out.zero_(),)

        _, again = capture(host, (x,))
        (out,) = again(x)
        assert kernel.launches == [pointers(x, out)]
        assert steps_of(again) == ["layout0", "launch0", "operation1"]

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work) for _ in range(4)]:
            done.result(60)


def test_lists_of_tensors_are_refused():
    """A replay would read the tensors of the capture again."""
    x, y = torch.ones(2, 4)
    with pytest.raises(AssertionError, match="takes lists of tensors"):
        capture(lambda x, y: (torch.cat([x, y]),), (x, y))


@pytest.mark.parametrize("radius", [0, 1, 20, 300])
def test_sums_over_distances_follow_the_operands(radius):
    """Replay what torch does after the kernel of bands, with another call's sums."""
    spec = AttentionSpec(1, 70, 90, 2, 2, 16, 16, "float32", 1.0)
    bands = bands_of(spec, radius, 32, 16)

    def sums():
        return torch.randn(2, bands.num_near, 32, 16), torch.randn(2, bands.count)

    def host(tiles, of_bands):
        return (sums_of_distances(tiles, of_bands, bands),)

    first, other = sums(), sums()
    (found,), again = capture(host, first)
    torch.testing.assert_close(found, *host(*first))
    torch.testing.assert_close(again(*other)[0], *host(*other))
