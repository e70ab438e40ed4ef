from itertools import count

from bench.sampling import Sample, Sampler

SAMPLES = [
    Sample(0.00, 1980.0, 3201.0, 300.0, 50.0, 0x01),  # idle is no throttling
    Sample(0.05, 1500.0, 3201.0, 690.0, 62.0, 0x04),
    Sample(0.10, 1700.0, 3201.0, 650.0, 61.0, 0x24),
]


def sampled(samples):
    sampler = Sampler(None)
    sampler.samples += samples
    return sampler


def test_a_summary_has_what_held_the_card_back():
    assert sampled(SAMPLES).summary() == {
        "sm_mhz": 1700.0,
        "sm_mhz_lowest": 1500.0,
        "memory_mhz": 3201.0,
        "watts": 650.0,
        "watts_highest": 690.0,
        "celsius": 62.0,
        "throttle": ["power cap", "thermal slowdown"],
    }


def test_it_samples_until_it_is_left_and_goes_on_when_it_is_entered_again():
    numbers = count()
    sampler = Sampler(lambda: SAMPLES[0]._replace(time=float(next(numbers))), interval=0.001)
    lengths = []
    for _ in range(2):
        with sampler:
            before = len(sampler.samples)
            while len(sampler.samples) < before + 3:
                pass
        lengths.append(len(sampler.samples))
    assert lengths[1] >= lengths[0] + 3
    assert [sample.time for sample in sampler.samples] == list(range(lengths[1]))
