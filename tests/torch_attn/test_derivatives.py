import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jvp

from torch_attn import (
    block_sparse_attention,
    dilated_attention,
    flash_attention,
    flash_attention_varlen,
    merge_states,
)

BIAS = torch.zeros(1, 1, 32, 32)
MASK, OFFSETS = torch.ones(1, 1, dtype=torch.bool), torch.tensor([0, 12, 32]).int()
OF = {
    "flash_attention": lambda x: flash_attention(x, x, x),
    "flash_attention with sinks": lambda x: flash_attention(
        x, x, x, sinks=x[0, 0, :, 0].contiguous()
    ),
    "flash_attention with a bias": lambda x: flash_attention(x, x, x, bias=BIAS.to(x.device)),
    "flash_attention_varlen": lambda x: flash_attention_varlen(
        x[0], x[0], x[0], *[OFFSETS.to(x.device)] * 2
    ),
    "block_sparse_attention": lambda x: block_sparse_attention(x, x, x, MASK.to(x.device)),
    "dilated_attention": lambda x: dilated_attention(x, x, x, (8, 16, 32), (1, 2, 4)),
    "dilated_attention of two calls": lambda x: dilated_attention(x, x, x, (16, 32), (1, 4)),
    "dilated_attention of one pair": lambda x: dilated_attention(x, x, x, (32,), (4,)),
    "merge_states": lambda x: merge_states(
        torch.stack([x, x]), x.sum(-1).mT[None].repeat(2, 1, 1, 1)
    )[0],
}
every_function = pytest.mark.parametrize("name", OF)


@pytest.fixture
def x(torch_device):
    torch.manual_seed(0)
    return torch.randn(1, 32, 2, 16, device=torch_device)


def refused(name, derivative):
    message = f"^{name.split()[0]}: {derivative} is not supported; reverse mode, once, is"
    return pytest.raises(NotImplementedError, match=message)


@pytest.mark.parametrize("name", [name for name in OF if not name.startswith("flash")])
def test_forward_mode_is_refused(x, name):
    with refused(name, "forward mode"):
        jvp(OF[name], (x,), (x,))
    with refused(name, "forward mode"), forward_ad.dual_level():
        OF[name](forward_ad.make_dual(x, x))


@every_function
def test_second_derivatives_are_refused(x, name):
    def loss(x):
        return OF[name](x).square().sum()

    with refused(name, "a second derivative"):
        grad(lambda x: grad(loss)(x).sum())(x)
    x = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(loss(x), x, create_graph=True)
    with refused(name, "a second derivative"):
        dx.sum().backward()
    factor = torch.ones((), device=x.device, requires_grad=True)
    (dx,) = torch.autograd.grad(factor * loss(x), x, create_graph=True)
    with refused(name, "a second derivative"):
        torch.autograd.grad(dx.sum(), factor)


@pytest.mark.parametrize("name", ["flash_attention", "flash_attention_varlen"])
def test_second_derivatives_with_forward_mode_are_refused(x, name):
    def tangent(x):
        return jvp(lambda x: OF[name](x).sum(), (x,), (torch.ones_like(x),))[1]

    for twice in (
        lambda x: jvp(grad(lambda x: OF[name](x).sum()), (x,), (x,)),
        grad(tangent),
        lambda x: jvp(tangent, (x,), (x,)),
    ):
        with refused(name, "a second derivative"):
            twice(x)
    leaf = x.clone().requires_grad_()
    with forward_ad.dual_level():
        out, dout = forward_ad.unpack_dual(OF[name](forward_ad.make_dual(leaf, x)))
        for y in (out, dout):  # a gradient here would have a tangent
            with refused(name, "a second derivative"):
                y.sum().backward(retain_graph=True)
    out.sum().backward()
    (want,) = torch.autograd.grad(OF[name](leaf).sum(), leaf)
    torch.testing.assert_close(leaf.grad, want)


@pytest.mark.parametrize("name", [name for name in OF if "varlen" not in name])
def test_vmap_over_no_element(x, name):
    nothing = x[None][:0]
    assert torch.vmap(OF[name])(nothing).shape == nothing.shape
    assert torch.vmap(grad(lambda x: OF[name](x).sum()))(nothing).shape == nothing.shape


@pytest.mark.parametrize("of", ["backward", "torch.func", "compile", "jvp", "dual"])
def test_slopes_have_no_gradient(x, of):
    slopes = torch.ones(2, device=x.device)

    def attend(slopes):
        return flash_attention(x, x, x, alibi_slopes=slopes).sum()

    message = "alibi_slopes: expected constants"

    def dual(slopes):
        with forward_ad.dual_level():
            attend(forward_ad.make_dual(slopes, slopes))

    calls = {
        "torch.func": grad(attend), "dual": dual,
        "jvp": lambda slopes: jvp(attend, (slopes,), (slopes,)),
    }  # fmt: skip
    if of in calls:
        with pytest.raises(NotImplementedError, match=message):
            calls[of](slopes)
        return
    attend = torch.compile(attend, backend="eager") if of == "compile" else attend
    with pytest.raises(NotImplementedError, match=message):
        attend(slopes.requires_grad_())
    with torch.no_grad():
        attend(slopes)
