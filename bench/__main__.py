"""Measure both sides beside their peers, report and compare.

Exit codes: 0 done, 1 a check failed, 2 bad arguments, a missing package or no GPU, 130 interrupted.
"""

from __future__ import annotations

import os
import sys

from bench.journal import VARIABLE, supervise
from twin_attention.interop.parity.arguments import HelpfulParser, require

REPORTING = ("matplotlib", "numpy", "rich")
RUNNING = ("jax", "torch", "triton")


def main(argv: list[str] | None = None) -> int:
    parser = HelpfulParser(prog="python -m bench", description=__doc__)
    require(parser.error, REPORTING)
    from bench import compare, mine
    from bench.report import command as report
    from bench.report import overview
    from bench.suites import command as suites

    parser.set_defaults(run=None)
    commands = parser.add_subparsers(metavar="COMMAND")
    mine.add_parser(commands)
    suites.add_parsers(commands)
    report.add_parser(commands)
    compare.add_parser(commands)
    overview.add_parser(commands)
    arguments = parser.parse_args(argv)
    if arguments.run is None:
        parser.print_help(sys.stderr)
        return 2
    if arguments.run not in (report.run, compare.run, overview.run):
        require(parser.error, RUNNING)
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main() if VARIABLE in os.environ else supervise(sys.argv[1:]))
