"""Say what shipped configurations take.

Exit codes: 0 done, 1 a check failed, 2 bad arguments or a missing package, 130 interrupted.
"""

from __future__ import annotations

import sys

from twin_attention.interop.parity.arguments import HelpfulParser, require

NEEDED = ("jax", "rich", "torch", "triton")


def main(argv: list[str] | None = None) -> int:
    parser = HelpfulParser(prog="python -m tuning", description=__doc__)
    require(parser.error, NEEDED)
    from tuning.static import command as static

    parser.set_defaults(run=None)
    commands = parser.add_subparsers(metavar="COMMAND")
    static.add_parser(commands)
    arguments = parser.parse_args(argv)
    if arguments.run is None:
        parser.print_help(sys.stderr)
        return 2
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
