"""Another library's attention, as a subject of parity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Literal, cast

import numpy as np
import torch

from twin_attention.interop.parity.cases import Case, FlashCase, VarlenCase
from twin_attention.interop.parity.inputs import GRADIENTS, Tensors
from twin_attention.interop.parity.records import features_of, function_of
from twin_attention.interop.parity.subjects.absent import Absent, refusals
from twin_attention.interop.parity.subjects.formulas import OneSequence, visible
from twin_attention.interop.parity.subjects.subject import Run, Subject
from twin_attention.interop.parity.torch_calls import Attend, call_torch

# What a function takes by name; the other tensors of a call are known before it.
OPERANDS = ("q", "k", "v", "k_pages", "v_pages", "sinks", "bias", "relative_bias")
Make = Callable[[Any, dict[str, Any]], Attend]


@dataclass(frozen=True, eq=False)
class Library(Subject):
    """A library's attention.

    Attributes:
        make: from a case and the call's tensors, a function of the operands with a gradient by
            name, that returns out, or out and the log-sum-exp; may raise `Absent`.
        claims: the features (`records.features_of`) that it has, and what it returns besides out:
            "lse", "gradients", "gradient of lse". Padding holds NaN if it claims "NaN".
        asks: `make` takes lse=True for the log-sum-exp, which `bench` does not ask for.
        heads_first: its q, k, v and out are [B, H, S, D].
    """

    label: str
    framework: Literal["torch", "jax"]
    package: str
    make: Make
    claims: frozenset[str]
    heads_first: bool = False
    asks: bool = False
    on_cpu: Literal["all", "forward", "nothing"] = "nothing"
    target: None = None
    is_guarded = False

    @property
    def has_lse(self) -> bool:
        return "lse" in self.claims

    @property
    def has_gradients(self) -> bool:
        return "gradients" in self.claims

    @property
    def has_dlse(self) -> bool:
        return self.claims >= {"lse", "gradients", "gradient of lse"}

    @property
    def version(self) -> str:
        try:
            return version(self.package)
        except PackageNotFoundError as error:
            raise Absent(f"{self.package} is not installed") from error

    def on(self, device: str) -> Library:
        """Return the library with its claims on a device; raise `Absent` if there are none."""
        _ = self.version
        if device == "cpu" and self.on_cpu == "nothing":
            raise Absent("it needs a GPU")
        is_less = device == "cpu" and self.on_cpu == "forward"
        return replace(self, claims=self.claims - {"gradients", "lse"}) if is_less else self

    def supports(self, case: Case) -> str | None:
        unclaimed = self._unclaimed(case)
        return f"not claimed: {', '.join(unclaimed)}" if unclaimed else None

    def fit(self, case: Case) -> Case:
        """Return a case with plain values of what is not claimed."""
        is_known = function_of(asdict(case)) in self.claims
        for change in _plain_values(case) if is_known else ():
            left = self._unclaimed(case)
            plain: Any = replace(case, **change)
            if getattr(plain, "tree", "") and not getattr(plain, "causal", True):
                continue  # a tree is causal
            if left and len(self._unclaimed(plain)) < len(left):
                case = plain
        return case

    def _unclaimed(self, case: Case) -> list[str]:
        return [x for x in features_of(asdict(case)) if x not in self.claims]

    def start(self) -> Run:
        return self.run

    def run(self, case: Case, inputs: Tensors, constants: Sequence[str] = ()) -> Tensors:
        """Return outputs and gradients by name; `constants` have a gradient all the same."""
        if "NaN" not in self.claims:
            inputs = {x: _without_nan(y) for x, y in inputs.items()}
        operands = {x: inputs[x] for x in inputs if x not in GRADIENTS}
        varied = {x: operands[x] for x in OPERANDS if x in operands}
        dout = {x: inputs[x] for x in GRADIENTS if x in inputs}
        with refusals():
            if self.framework == "torch":
                found = call_torch(self.attend(case, operands), varied, [*dout.values()])
            else:
                from twin_attention.interop.parity.jax_calls import call_jax, share

                found = call_jax(self.attend(case, share(operands)), varied, dout)
        outputs = ("out", "lse") if self.has_lse else ("out",)
        return dict(zip((*outputs, *(f"d{x}" for x in varied)), found, strict=False))

    def attend(self, case: Case, tensors: dict[str, Any]) -> Attend:
        """Return a function of named operands, heads behind tokens."""
        more = {"lse": True} if self.asks and self.has_lse else {}
        function = cast(Any, self.make)(case, tensors, **more)

        def attend(**operands: Any) -> Any:
            qkv = [operands.pop(x) for x in [*operands][:3]]
            if self.heads_first:
                qkv = [x.swapaxes(-3, -2) for x in qkv]
            found = function(*qkv, **operands)
            out, *more = found if isinstance(found, tuple) else (found,)
            out = out.swapaxes(-3, -2) if self.heads_first else out
            return (out, *more) if self.has_lse else out

        return attend

    def explain(self, case: Case, inputs: Tensors) -> str:
        return f"{self.package} {self.version}"


def _without_nan(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float8_e4m3fn:
        stored = x.view(torch.uint8)
        return stored.masked_fill(stored & 0x7F == 0x7F, 0).view(x.dtype)
    return x.masked_fill(x.isnan(), 0) if x.is_floating_point() else x


def _plain_values(case: Any) -> Iterator[dict[str, Any]]:
    """Yield changes that make a case plainer."""
    sizes = ("name", "seq_q", "seq_kv", "batch", "lengths", "new_tokens", "heads_q", "heads_kv")
    for x in fields(case):
        if x.name not in sizes and x.default is not MISSING:
            yield {x.name: x.default}
    yield from ({"dtype": x} for x in ("float16", "float32"))
    yield {"heads_q": case.heads_kv}
    if isinstance(case, FlashCase):
        yield {"seq_q": case.seq_q or 1, "seq_kv": case.seq_kv or 1, "batch": case.batch or 1}
        yield {"seq_kv": case.seq_q}
    elif isinstance(case, VarlenCase):
        yield {"lengths": tuple((m or 1, n or 1) for m, n in case.lengths or [(9, 9)])}
        yield {"lengths": tuple((m, m) for m, _ in case.lengths)}
        yield {"padding": (0, 0)}
    else:
        yield {"lengths": (max(1, *case.lengths, 1),) * (len(case.lengths) or 1)}


def load(module: str) -> ModuleType:
    try:
        return import_module(module)
    except (ImportError, RuntimeError) as error:  # FlashInfer's, without a part of CUTLASS's DSL
        raise Absent(f"{module} cannot be imported: {error}") from error


def mask_of(case: Any, tensors: dict[str, Any]) -> np.ndarray | None:
    """Return which queries see which keys, [B or 1, 1, Sq, Skv] bool; None for all."""
    if not needs_mask(case) and not case.causal:
        return None
    names = ("q_segment_ids", "kv_segment_ids", "kv_ends", "q_ranges")
    ids = {x: tensors[x] for x in names if x in tensors}
    own = {x: np.asarray(y.cpu() if isinstance(y, torch.Tensor) else y) for x, y in ids.items()}
    batch = range(case.batch if own else 1)
    masks = [visible(case, own, OneSequence((b,), (b,), (b,), b), case.seq_q, case.seq_kv)
             for b in batch]  # fmt: skip
    return np.stack(masks)[:, None]


def needs_mask(case: Any) -> bool:
    """Return True if more than a causal mask hides keys."""
    return case.window_size is not None or bool(case.segments or case.tree)
