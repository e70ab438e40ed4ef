import pytest

from bench.peaks import datasheet, peak_jobs


@pytest.mark.parametrize(
    ("device", "tflops", "gigabytes_per_second"),
    [
        ("NVIDIA H200 (compute capability 9.0)", 989, 4800),
        ("NVIDIA H100 80GB HBM3", 989, 3350),
        ("NVIDIA H100 PCIe", 756, 2039),
        ("NVIDIA A100-SXM4-80GB", 312, 2039),
        ("NVIDIA A100-SXM4-40GB", 312, 1555),
    ],
)
def test_a_device_is_found_by_its_name(device, tflops, gigabytes_per_second):
    found = datasheet(device)
    assert (found.tflops, found.gigabytes_per_second) == (tflops, gigabytes_per_second)
    assert datasheet("Fake GPU (compute capability 9.0)") is None


def test_peaks_count_what_they_move():
    matmul, read, copy = peak_jobs()
    assert {job.operation for job in (matmul, read, copy)} == {"peak"}
    assert matmul.flops == 2 * 8192**3
    assert (read.reads, read.writes, read.bytes) == (2**30, 0, 2**30)
    assert (copy.reads, copy.writes, copy.bytes) == (2**30, 2**30, 2**31)
