"""Read lists of calls, one a line, and compile each: ``python -m torch_attn.warm FILE``."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, FileType
from ast import literal_eval
from collections.abc import Callable, Sequence
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple

from twin_attention.contract.validate.errors import fail

FUNCTIONS = (
    "flash_attention", "flash_attention_varlen", "paged_decode", "paged_attention", "append_kv",
    "merge_states",
)  # fmt: skip
_ARGUMENT = re.compile(r"(\w+)=(\([^)]*\)|\S+)")
_OPERAND = re.compile(r"(\d+(?:x\d+)*):([a-z]\w*)")


class CallText(NamedTuple):
    """A call; `operands` has a shape and a dtype's name for each."""

    function: str
    operands: dict[str, tuple[tuple[int, ...], str]]
    options: dict[str, Any]

    @property
    def has_gradients(self) -> bool:
        return self.function.startswith("flash")

    @property
    def constants(self) -> frozenset[str]:
        """The operands that have no gradient, besides those that are not floating."""
        return frozenset({"alibi_slopes"} if self.has_gradients else self.operands)


def parse(line: str) -> CallText:
    """Return the call that a line describes.

    An operand is its name, shape and dtype, an option is a Python literal::

        flash_attention q=1x128x4x64:float16 k=1x128x4x64:float16 v=1x128x4x64:float16 causal=True

    Raises:
        ValueError: no such function, or a word that is neither operand nor option.
    """
    name, _, rest = line.strip().partition(" ")
    if name not in FUNCTIONS:
        fail(ValueError, "function", f"one of {', '.join(FUNCTIONS)}", repr(name))
    if left := _ARGUMENT.sub("", rest).strip():
        fail(ValueError, name, "arguments such as q=1x128x4x64:float16 or causal=True", repr(left))
    call = CallText(name, {}, {})
    for argument, value in _ARGUMENT.findall(rest):
        if (found := _OPERAND.fullmatch(value)) is not None:
            call.operands[argument] = tuple(map(int, found[1].split("x"))), found[2]
            continue
        try:
            call.options[argument] = literal_eval(value)
        except (ValueError, SyntaxError):
            expected = "a shape and a dtype, such as 1x128x4x64:float16, or a Python literal"
            fail(ValueError, argument, expected, value)
    return call


def main(package: str, compile: Callable[[CallText], object], arguments: Sequence[str]) -> int:
    """Compile the calls of files, and print how long each took; return 1 if one failed."""
    parser = ArgumentParser(
        prog=f"python -m {package}.warm",
        description="Compile the kernels of calls ahead, into the caches on disk.",
        epilog="A line of a file is a function, then operands as name=SHAPE:DTYPE and options as "
        "name=VALUE: flash_attention q=1x128x4x64:float16 k=1x128x4x64:float16 "
        "v=1x128x4x64:float16 causal=True. Empty lines and those that begin with # say nothing.",
    )
    parser.add_argument("files", nargs="+", type=FileType(), help="lists of calls; - for input")
    failed = False
    for line in chain(*parser.parse_args(arguments).files):
        if not line.strip() or line.startswith("#"):
            continue
        start = perf_counter()
        try:
            compile(parse(line))
            print(f"{perf_counter() - start:6.1f} s  {line.strip()}", flush=True)
        except (ValueError, TypeError, NotImplementedError) as error:
            failed = True
            print(f"{line.strip()}\n  {error}", file=sys.stderr)
    return int(failed)
