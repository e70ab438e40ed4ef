from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pallas_attn import block_sparse, decode, dilated, flash, paged, private, varlen
from pallas_attn.decode_ops import PAGED_ATTENTION, PAGED_DECODE
from pallas_attn.dispatch import check_implementation, describe_choice
from pallas_attn.flash_ops import DENSE, PACKED, or_as_xla_says
from pallas_attn.operands import device_of
from twin_attention.contract.explain import Explanation
from twin_attention.contract.validate.errors import fail, type_name
from twin_attention.targets.describe import describe_call
from twin_attention.targets.target import requested_target

# For each function, returns a call's operands, its problem, and how ranks exchange keys if they do.
# Submodules such as `distributed` add their functions when they are imported.
PROBLEMS: dict[Callable[..., Any], Callable[..., Any]] = {
    flash.flash_attention: DENSE.problem,
    varlen.flash_attention_varlen: PACKED.problem,
    block_sparse.block_sparse_attention: block_sparse.problem_of_block_sparse,
    dilated.dilated_attention: dilated.problem_of_dilated,
    decode.paged_decode: PAGED_DECODE.problem,
    paged.paged_attention: PAGED_ATTENTION.problem,
    decode.append_kv: decode.problem_of_append,
    decode.merge_states: decode.problem_of_merge,
}


def explain(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Say what a function of this package would run for these arguments, and why; run nothing.

    Under `jit` the operands' device is not known yet, so the answer is for the default device; the
    lowering platform decides in the end.

    Args:
        function: a function of attention (`dilated_attention` by its longest segments,
            `distributed.context_attention` by one rank), `append_kv` or `merge_states`.
        args, kwargs: its arguments.

    Returns:
        The implementation, the target, each kernel's configuration, and why no faster family runs.

    Raises:
        ValueError: `function` is none of these.
        TypeError, ValueError, NotImplementedError: as the function itself raises for them.

    Example::

        import jax
        from pallas_attn import explain, flash_attention

        q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 128, 4, 64))
        print(explain(flash_attention, q, k, v, causal=True))
    """
    if not any(function is known for known in PROBLEMS):
        names = ", ".join(known.__name__ for known in PROBLEMS)
        expected = f"one of pallas_attn's {names}, as in explain(flash_attention, q, k, v)"
        fail(ValueError, "function", expected, getattr(function, "__name__", type_name(function)))
    try:
        call = inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        function(*args, **kwargs)  # its own error says more
        raise
    call.apply_defaults()
    implementation = call.arguments.pop("implementation")
    check_implementation(implementation)
    requested_target()  # refuses a wrong one, even where no code is compiled for it
    if "deterministic" in call.arguments:
        call.arguments["deterministic"] = or_as_xla_says(call.arguments["deterministic"])
    operands, spec, *exchange = PROBLEMS[function](**call.arguments)
    device = device_of(operands[0])

    def describe_operation(operation: str) -> Explanation:
        return describe_choice(implementation, operation, device, spec)

    said = describe_call(function.__name__, describe_operation)
    said = replace(said, exchange=exchange[0] if exchange else None)
    compiles = said.implementation == "triton" and said.target is not None
    notes = [private.untested(), private.without_triton() if compiles else None]
    return replace(said, reason="; ".join(filter(None, (said.reason, *notes))))
