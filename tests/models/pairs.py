from pathlib import Path

import torch

from models import jax_model, torch_model
from models.config import ModelConfig, make_config
from models.weights import copy_to_jax

TINY = {
    "modern": make_config("tiny"),
    "tied head": make_config("tiny", tied_head=True),
    "gpt": make_config("tiny", "gpt"),
}
TEXT = (Path(__file__).parents[2] / "LICENSE").read_bytes()


def make_pair(
    config: ModelConfig, attention: tuple[str, str], device: str
) -> tuple[torch_model.Transformer, jax_model.Transformer]:
    """PyTorch's initial weights, ten times as large: smaller ones add next to nothing."""
    torch.manual_seed(0)
    of_torch = torch_model.Transformer(config, attention[0]).to(device)
    with torch.no_grad():
        for parameter in of_torch.parameters():
            if parameter.ndim == 2:
                parameter *= 10
    of_jax = jax_model.Transformer(config, attention[1])
    copy_to_jax(of_torch, of_jax)
    return of_torch, of_jax


def in_float64(model: torch_model.Transformer) -> torch_model.Transformer:
    device = model.embed.weight.device
    copy = torch_model.Transformer(model.config, "eager", device=device, dtype=torch.float64)
    copy.load_state_dict(model.state_dict())
    return copy


def batch_of(device: str, step: int = 0, batch: int = 2, length: int = 32) -> torch.Tensor:
    size = batch * (length + 1)
    tokens = torch.tensor(list(TEXT[step * size : (step + 1) * size]), dtype=torch.int32)
    return tokens.reshape(batch, -1).to(device)
