"""Checks of a command line that need no framework."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Refuse = Callable[[str], object]  # a parser's `error`: prints the message, exits with code 2


class HelpfulParser(argparse.ArgumentParser):
    """Print the help if a command that needs arguments gets none."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = sys.argv[1:] if args is None else args
        is_in_need = any(
            action.required and action.nargs != argparse.PARSER for action in self._actions
        )
        if not given and is_in_need:
            self.print_help(sys.stderr)
            self.exit(2)
        return super().parse_known_args(args, namespace)


def count(text: str) -> int:
    """Return a number of 1 or more, as argparse's `type`."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, got {text!r}")
    return number


def require(refuse: Refuse, packages: Iterable[str]) -> None:
    """Refuse to run if a package is missing; say how to install it."""
    if missing := [name for name in packages if find_spec(name) is None]:
        names = ", ".join(missing)
        refuse(f"{names} missing: in a checkout of twin-attention, pip install '.[parity]'")


def make_folder(refuse: Refuse, option: str, folder: Path) -> None:
    """Create the output folder now, so that a bad path fails before the run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"{option}: expected a folder that can be made, got {str(folder)!r}: {error}")
    if not os.access(folder, os.W_OK):
        refuse(f"{option}: expected a folder to write to, got {str(folder)!r}")
