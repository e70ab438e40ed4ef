from hypothesis import given
from hypothesis import strategies as st

from tests.contract.test_spec import spec_of
from twin_attention.targets.bands import bands_of

blocks = st.sampled_from([16, 32, 64, 128])
lengths = st.integers(1, 200)


@given(lengths, lengths, st.integers(0, 300), blocks, blocks)
def test_every_pair_is_in_a_band_of_its_kind(seq_q, seq_kv, radius, block_q, block_kv):
    spec = spec_of(seq_q, seq_kv)
    bands = bands_of(spec, radius, block_q, block_kv)
    assert 0 <= bands.near <= bands.near + bands.num_near <= bands.count
    for query in {0, seq_q // 3, seq_q - 1}:
        start = query // block_q * block_q + spec.diagonal
        for key in {0, seq_kv // 2, seq_kv - 1}:
            distance = key - query - spec.diagonal
            band = (key - start) // block_kv - bands.first
            assert 0 <= band < bands.count
            if abs(distance) < bands.reach:
                assert bands.near <= band < bands.near + bands.num_near
            elif not bands.near <= band < bands.near + bands.num_near:
                assert (band < bands.near) == (distance < 0)


@given(lengths, lengths, st.integers(0, 10**6), blocks, blocks)
def test_bands_grow_with_lengths_alone(seq_q, seq_kv, radius, block_q, block_kv):
    bands = bands_of(spec_of(seq_q, seq_kv), radius, block_q, block_kv)
    assert bands.count <= 2 * (max(seq_q, seq_kv) // block_kv + 2) + block_q // block_kv
