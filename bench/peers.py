"""The libraries that the twins are compared with: parity's, as calls to time.

A factory returns a call or raises `Absent`. A flash factory takes (case, operation, tensors):
torch's q, k, v, terms and dout, [B, S, H, D] or packed [T, H, D].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from bench.calls import as_torch, jax_call, torch_call
from bench.job import Call
from bench.problems import AttentionCase, DecodeTensors, document_lengths, named_inputs
from twin_attention.interop.parity.cases import DecodeCase, FlashCase, VarlenCase
from twin_attention.interop.parity.subjects.absent import Absent, refusals

if TYPE_CHECKING:
    from torch import Tensor

Attend = Callable[..., Any]


def attention(
    name: str, case: AttentionCase, operation: str, tensors: Sequence[Tensor],
    wrap: Callable[[Attend], Attend] = lambda attend: attend, **options: Any,
) -> Call:  # fmt: skip
    library = _claimed(name, case)
    if operation != "forward" and not library.has_gradients:
        raise Absent("its package has the forward only")
    inputs = named_inputs(case, [*tensors[:-1]])
    terms = [*inputs][3 : len(tensors) - 1]
    if library.framework == "jax":
        from twin_attention.interop.parity.jax_calls import share

        inputs = share(inputs)
    make = partial(library.make, **options)
    call, more = jax_call, {}
    if library.framework == "torch":
        call, more = torch_call, {"heads_first": library.heads_first}
    with refusals():
        attend = wrap(_by_position(make(case, inputs), terms))
        found = call(attend, operation, tensors, **more)
        found.run()
    return found


def paged(name: str, case: DecodeCase, tensors: DecodeTensors) -> Call:
    library, arguments = _claimed(name, case), tensors.arguments
    operands = [arguments[x] for x in ("q", "k_pages", "v_pages")]
    return Call(partial(library.make(case, arguments), *operands), lambda out: (out,))


def flash_mla(case: DecodeCase, tensors: DecodeTensors) -> Call:
    """FlashMLA, whose first call plans."""
    from twin_attention.interop.parity.subjects.library import load

    library, x, spec = load("flash_mla.flash_mla_interface"), tensors.arguments, case.spec
    q = x["q"].view(spec.batch, spec.tokens, spec.heads_q, spec.head_dim)
    run = partial(
        library.flash_mla_with_kvcache, q, x["k_pages"], x["block_tables"], x["seq_lens"],
        spec.head_dim_v, library.get_mla_metadata()[0], softmax_scale=spec.scale, causal=True,
    )  # fmt: skip
    return Call(run, lambda found: (found[0].view(*x["q"].shape[:-1], spec.head_dim_v),))


def sdpa_operator(
    backend: Literal["flash", "cudnn"], case: FlashCase, operation: str, tensors
) -> Call:
    """The operator behind torch's SDPA, for host times: `sdpa_kernel` takes as long as it does."""
    _claimed("cuDNN", case)
    import torch

    operator = getattr(torch, f"_scaled_dot_product_{backend}_attention")
    options: dict[str, Any] = {"is_causal": case.causal, "scale": case.scale}
    if backend == "cudnn":
        options |= {"attn_bias": None, "compute_log_sumexp": operation != "forward"}

    def attend(q, k, v):
        return operator(q, k, v, **options)[0]

    return torch_call(attend, operation, tensors, heads_first=True)


def flash_attn(case: FlashCase, operation: str, tensors) -> Call:
    """flash-attn, whose dropout has bits of its own."""
    if not case.dropout_rate:
        return attention("flash-attn", case, operation, tensors)
    plain = replace(case, dropout_rate=0.0)
    call = attention("flash-attn", plain, operation, tensors, dropout=case.dropout_rate)
    return call._replace(result=None)


def padded(
    factory: Callable[..., Call], case: VarlenCase, operation: str, tensors: Sequence[Tensor]
) -> Call:
    """A flash peer on the documents, padded to the longest one.

    Padding comes last, where causal rows do not see it; its gradient is 0.
    """
    if not case.causal:
        raise Absent("without a causal mask it would see padding")
    _claimed("jax.nn XLA packed", case)
    import torch

    lengths = torch.tensor(document_lengths(case), device=tensors[0].device)
    batch, longest = len(lengths), -(-max(document_lengths(case)) // 64) * 64
    is_token = torch.arange(longest, device=lengths.device) < lengths[:, None]

    def pad(x: Tensor) -> Tensor:
        rows = x.new_zeros(batch, longest, *x.shape[1:])
        rows[is_token] = x
        return rows

    dense = FlashCase(
        case.name, batch, longest, longest, case.heads_q, case.heads_kv, case.head_dim,
        case.head_dim_v, case.dtype, case.causal, scale=case.scale,
    )  # fmt: skip
    call = factory(dense, operation, [pad(x) for x in tensors])
    result = call.result
    assert result is not None
    return call._replace(result=lambda found: [as_torch(x)[is_token] for x in result(found)])


def _claimed(name: str, case: AttentionCase | DecodeCase) -> Any:
    from twin_attention.interop.parity.subjects.libraries import LIBRARIES

    if reason := LIBRARIES[name].supports(case):
        raise Absent(reason)
    return LIBRARIES[name]


def _by_position(attend: Attend, terms: Sequence[str]) -> Attend:
    return lambda q, k, v, *rest: attend(q, k, v, **dict(zip(terms, rest, strict=True)))


def _flash(*names: str) -> dict[str, Callable[..., Call]]:
    return {name: partial(attention, name) for name in names}


SDPA, EFFICIENT = partial(attention, "SDPA"), partial(attention, "efficient")
FLASH: Mapping[str, Callable[..., Call]] = _flash(
    "eager", "FA2", "FA3", "FA4", "cuDNN", "FlexAttention", "jax.nn XLA", "jax.nn cuDNN",
    "jax FA3", "jax Pallas mha", "tokamax Mosaic", "tokamax Triton",
)  # fmt: skip
WIDE: Mapping[str, Callable[..., Call]] = _flash(
    "FlexAttention", "efficient", "ffpa-attn", "cuDNN frontend"
)
PACKED: Mapping[str, Callable[..., Call]] = {
    **_flash("FA2 varlen", "FA3 varlen", "FA4 varlen", "jax FA3 varlen"),
    "FlexAttention": partial(attention, "FlexAttention packed"),
    **{f"{name} padded": partial(padded, FLASH[name])
       for name in ("FA2", "cuDNN", "tokamax Mosaic", "jax.nn cuDNN")},
    "jax.nn XLA": partial(attention, "jax.nn XLA packed"),
}  # fmt: skip
SPARSE: Mapping[str, Callable[..., Call]] = {
    name: partial(attention, f"{name} blocks") for name in ("FlexAttention", "jax.nn XLA")
}
TREE: Mapping[str, Callable[..., Call]] = {
    "FlexAttention": FLASH["FlexAttention"],
    "FlexAttention, mask made": partial(FLASH["FlexAttention"], makes_mask=True),
    "FlexAttention, mask made uncompiled": partial(
        FLASH["FlexAttention"], makes_mask=True, compiles_mask=False
    ),
    "cuDNN frontend flex": partial(attention, "cuDNN frontend flex"),
    "cuDNN frontend flex, plan made": partial(attention, "cuDNN frontend flex", makes_plan=True),
}
SCORES: Mapping[str, Callable[..., Call]] = {
    "FlexAttention": FLASH["FlexAttention"],
    "SDPA": SDPA,
    "jax.nn cuDNN": FLASH["jax.nn cuDNN"],
    "flash-attn": flash_attn,
}
TANGENTS: Mapping[str, Callable[..., Call]] = _flash(
    "eager", "jvp-flash-attention", "fa4-jax", "jax.nn XLA"
)
DECODE: Mapping[str, Callable[..., Call]] = {
    name: partial(paged, name) for name in ("FlashInfer", "FA2 dense", "cuDNN dense")
}
PREFILL: Mapping[str, Callable[..., Call]] = {"FlashInfer": DECODE["FlashInfer"]}
