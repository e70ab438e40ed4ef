from examples.torch_host_keys import TOLERANCE, HostKeys, largest_error
from torch_attn.distributed import Transfer


def test_results_are_those_of_one_call(torch_device):
    assert largest_error(torch_device, seq_len=96, parts=4) < TOLERANCE


def test_gradients_that_stay_on_the_card_are_missed(monkeypatch, torch_device):
    exchange = HostKeys.exchange

    def keys_alone(self, tensors, sent, received, of_gradients=False):
        return Transfer(None) if of_gradients else exchange(self, tensors, sent, received)

    monkeypatch.setattr(HostKeys, "exchange", keys_alone)
    assert largest_error(torch_device, seq_len=96, parts=4) > 100 * TOLERANCE
