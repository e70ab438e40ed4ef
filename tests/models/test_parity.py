import pytest
import torch

pytest.importorskip("flax")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models import jax_model, torch_model
from models.weights import as_torch, copy_to_torch
from tests.models.pairs import TINY, batch_of, in_float64, make_pair
from twin_attention.contract.tolerances import compare_to_reference, compare_twins
from twin_attention.interop.exchange import to_jax, to_torch

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 50
LEARNING_RATE = 3e-3
ADAMW = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def ieee_products():
    """Keep JAX on a GPU from rounding float32 products to TF32."""
    with jax.default_matmul_precision("highest"):
        yield


def assert_alike(of_torch, of_jax, plain, ref, kind):
    budgets = [compare_to_reference(x, ref, plain, "float32", kind) for x in (of_torch, of_jax)]
    for agreement in (*budgets, compare_twins(of_torch, of_jax, *budgets)):
        assert agreement.ok, agreement


def results_in_torch(model, tokens):
    """Logits, loss, and the gradients of the losses' sum, which are not small like the mean's."""
    model.zero_grad()
    loss = torch_model.next_token_loss(model, tokens)
    (loss * tokens[:, 1:].numel()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return model(tokens[:, :-1]).detach(), loss.detach(), gradients


@nnx.jit
def run_in_jax(model, tokens):
    def total(model):
        loss = jax_model.next_token_loss(model, tokens)
        return loss * tokens[:, 1:].size, loss

    (_, loss), gradients = nnx.value_and_grad(total, has_aux=True)(model)
    return model(tokens[:, :-1]), loss, gradients  # XLA computes the logits once


def results_in_jax(model, tokens):
    logits, loss, gradients = run_in_jax(model, to_jax(tokens))
    return to_torch(logits), to_torch(loss), as_torch(gradients)


@pytest.mark.parametrize(
    ("form", "attention"),
    [
        ("modern", ("eager", "xla")),
        ("tied head", ("twin", "twin")),
        ("gpt", ("sdpa", "xla")),
        ("gpt", ("twin", "twin")),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_logits_loss_and_every_gradient_agree(form, attention, torch_device):
    tokens = batch_of(torch_device)
    in_torch, in_jax = make_pair(TINY[form], attention, torch_device)
    plain = torch_model.Transformer(TINY[form], "eager", device=torch_device)
    plain.load_state_dict(in_torch.state_dict())
    of_torch, lp = (results_in_torch(model, tokens) for model in (in_torch, plain))
    ref = results_in_torch(in_float64(in_torch), tokens)
    of_jax = results_in_jax(in_jax, tokens)
    for i in (0, 1):
        assert_alike(of_torch[i], of_jax[i], lp[i], ref[i], "output")
    assert of_torch[2].keys() == of_jax[2].keys() == dict(in_torch.named_parameters()).keys()
    for name, gradient in ref[2].items():
        assert gradient.abs().max() > 1e-2, f"{name} has too small a gradient to test"
        assert_alike(of_torch[2][name], of_jax[2][name], lp[2][name], gradient, "gradient")


def train_in_torch(model, steps, device):
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(ADAMW["b1"], ADAMW["b2"]),
        eps=ADAMW["eps"], weight_decay=ADAMW["weight_decay"],
    )  # fmt: skip
    losses = []
    for step in range(steps):
        loss = torch_model.next_token_loss(model, batch_of(device, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def train_in_jax(model, steps, device):
    optimizer = nnx.Optimizer(model, optax.adamw(LEARNING_RATE, **ADAMW), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, tokens):
        loss, gradients = nnx.value_and_grad(jax_model.next_token_loss)(model, tokens)
        optimizer.update(model, gradients)
        return loss

    losses = [step(model, optimizer, to_jax(batch_of(device, i))) for i in range(steps)]
    return to_torch(jnp.stack(losses))


def test_training_gives_the_same_losses(torch_device):
    in_torch, in_jax = make_pair(TINY["modern"], ("eager", "xla"), torch_device)
    ref = train_in_torch(in_float64(in_torch), STEPS, torch_device)
    of_torch = train_in_torch(in_torch, STEPS, torch_device)
    of_jax = train_in_jax(in_jax, STEPS, torch_device)
    assert ref[-5:].mean() < 0.7 * ref[0]
    assert_alike(of_torch, of_jax, of_torch, ref, "output")


def test_weights_come_back_the_same(torch_device):
    in_torch, in_jax = make_pair(TINY["gpt"], ("eager", "xla"), torch_device)
    other = torch_model.Transformer(TINY["gpt"], "eager", device=torch_device)
    copy_to_torch(in_jax, other)
    for name, parameter in in_torch.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name
    with torch.no_grad():
        in_torch.embed.weight.zero_()
    assert in_jax.embed.embedding[...].any(), "the models share memory"
