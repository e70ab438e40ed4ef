"""Say which implementation a call would run, where and why: the answer of `explain`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Explanation:
    """The choice that a call's arguments lead to.

    Attributes:
        implementation: the family's name, such as "gluon", "mosaic", "triton" or "reference".
        execution: "compiled" (GPU kernels), "interpreter" (the kernels on a CPU) or
            "framework" (the reference, in plain torch or jax operations).
        device: the device's name, such as "cpu" or "NVIDIA H200".
        target: "sm80" or "sm90" for compiled kernels, else None.
        reason: one sentence on why.
        configs: the configuration of each kernel; one that does not fit the device's shared memory
            runs with fewer stages (docs/targets.md).
        num_splits: parts that a paged decode divides each sequence's keys into, or None.
        passed_over: a line for each faster family that does not run the call, with the reason.
        by_name: the other side's families, which a caller may request by name.
        foreign: the kernels' package, such as "torch_attn", if the other side launches them.
        backward: what a backward would run, or why it would be refused, if the forward's family
            does not run it; else None.
        exchange: how ranks exchange keys, why, and in how many steps; None without ranks.
    """

    implementation: str
    execution: str
    device: str
    target: str | None
    reason: str
    configs: Mapping[str, object] = field(default_factory=dict)
    num_splits: int | None = None
    passed_over: tuple[str, ...] = ()
    backward: str | None = None
    exchange: str | None = None
    by_name: tuple[str, ...] = ()
    foreign: str | None = None

    def __str__(self) -> str:
        where = self.device if self.target is None else f"{self.target} code on {self.device}"
        if self.foreign is not None:
            where = f"kernels of {self.foreign}, {where}"
        lines = [f"{self.implementation} ({self.execution}, {where}): {self.reason}"]
        lines += [f"  not {line}" for line in self.passed_over]
        lines += [f"  {kernel}: {config}" for kernel, config in self.configs.items()]
        if self.num_splits is not None:
            lines.append(f"  splits of each sequence: {self.num_splits}")
        if self.exchange is not None:
            lines.append(f"  exchange: {self.exchange}")
        if self.by_name:
            lines.append(f"  by name, kernels of the other side: {', '.join(self.by_name)}")
        if self.backward is not None:
            lines += [f"  {line}" for line in f"backward: {self.backward}".splitlines()]
        return "\n".join(lines)
