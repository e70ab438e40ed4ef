"""The twins' calls, through their public functions, for each target.

"torch triton compiled" is the torch twin under `torch.compile`; the JAX twin is always jitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from bench.calls import compiled, jax_call, torch_call
from bench.job import Call, Subject
from interop.parity.cases import DecodeCase, FlashCase

if TYPE_CHECKING:
    from bench.suites.decode_inputs import DecodeTensors

Maker = Callable[..., Call]


def flash_makers(targets: Sequence[str], compiling: bool = True) -> dict[Subject, Maker]:
    """Makers, which take (case, operation, tensors) as peers' do.

    Args:
        targets: what to compile for.
        compiling: "torch triton compiled" as well.
    """
    makers = {"torch triton": triton_flash, "jax triton": pallas_flash}
    if compiling:
        makers["torch triton compiled"] = partial(
            triton_flash, wrap=partial(compiled, fullgraph=True)
        )
    return _for_targets(makers, targets)


def decode_makers(targets: Sequence[str]) -> dict[Subject, Maker]:
    """Makers, which take (case, tensors) as peers' do."""
    return _for_targets({"torch triton": triton_decode, "jax triton": pallas_decode}, targets)


def _for_targets(makers: dict[str, Maker], targets: Sequence[str]) -> dict[Subject, Maker]:
    return {
        Subject(name, target): partial(maker, target)
        for name, maker in makers.items()
        for target in targets
    }


def triton_flash(
    target: str, case: FlashCase, operation: str, tensors, wrap: Callable | None = None
) -> Call:
    """A call of `torch_attn.flash_attention`; `wrap` is applied to it beforehand."""
    from torch_attn import flash_attention
    from twin_attention.targets.target import use_target

    attend = partial(flash_attention, **case.options, implementation="triton")
    with use_target(target):
        call = torch_call(attend if wrap is None else wrap(attend), operation, tensors)
    return _for_target(call, target)


def pallas_flash(target: str, case: FlashCase, operation: str, tensors) -> Call:
    """A jitted call of `pallas_attn.flash_attention`."""
    from pallas_attn import flash_attention
    from twin_attention.targets.target import use_target

    attend = partial(flash_attention, **case.options, implementation="triton")
    with use_target(target):
        call = jax_call(attend, operation, tensors)
    return _for_target(call, target)


def triton_decode(target: str, case: DecodeCase, tensors: DecodeTensors) -> Call:
    """A call of `torch_attn.paged_decode`."""
    from torch_attn import paged_decode

    arguments = tensors.arguments | case.options | {"implementation": "triton"}
    return _for_target(Call(partial(paged_decode, **arguments), partial(_rows, case)), target)


def pallas_decode(target: str, case: DecodeCase, tensors: DecodeTensors) -> Call:
    """A jitted call of `pallas_attn.paged_decode`, on torch's memory."""
    import jax

    from interop.exchange import to_jax
    from pallas_attn import paged_decode

    arguments = {name: to_jax(x) for name, x in tensors.arguments.items()}
    run = partial(
        jax.jit(partial(paged_decode, **case.options, implementation="triton")), **arguments
    )
    return _for_target(Call(run, partial(_rows, case)), target)


def _for_target(call: Call, target: str) -> Call:
    """The call, with kernels of the target whenever it runs.

    JAX too may compile at any call: once more after a peer's import has changed its settings.
    """
    from twin_attention.targets.target import use_target

    def run():
        with use_target(target):
            return call.run()

    return call._replace(run=run)


def _rows(case: DecodeCase, out):
    """A decode's output as [B, T, Hq, Dv]."""
    spec = case.spec
    return (out.reshape(spec.batch, spec.tokens, spec.heads_q, spec.head_dim_v),)
