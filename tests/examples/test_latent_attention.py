import torch

from examples.latent_attention import TOLERANCE, LatentAttention, largest_differences


def test_decoding_gives_the_numbers_of_training(torch_device):
    assert max(largest_differences(torch_device)) < TOLERANCE


def test_other_values_are_seen(monkeypatch, torch_device):
    def swapped(layer, out):
        return layer.out(
            torch.einsum("shr,rhd->shd", out.float().flip(1), layer.value_up).flatten(1)
        )

    monkeypatch.setattr(LatentAttention, "of_latents", swapped)
    assert min(largest_differences(torch_device)) > 10 * TOLERANCE
