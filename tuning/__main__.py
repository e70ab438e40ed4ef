"""``python -m tuning COMMAND``.

Exit codes: 0 done, 1 a check failed, 2 bad arguments, a missing package or no GPU, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys

from interop.parity.arguments import require

NEEDED = ("jax", "rich", "torch", "triton")


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tuning", description=__doc__)
    require(parser.error, NEEDED, "bench")
    from tuning.search import command as search
    from tuning.static import command as static

    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    static.add_parser(commands)
    search.add_parser(commands)
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
