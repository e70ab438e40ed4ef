"""Write tables, plots and a page of records; needs no GPU."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from rich.progress import track

from bench.records import load, stem
from twin_attention.interop.parity.arguments import make_folder


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "report", help="write tables, plots and a page of records", description=__doc__
    )
    parser.add_argument(
        "records",
        type=Path,
        nargs="+",
        metavar="RECORDS",
        help="JSON lines, or those compressed with gzip",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("reports"),
        metavar="FOLDER",
        help="where NAME.md with its plots, NAME.html and NAME.csv go, named as the first RECORDS "
        "are (default: reports)",
    )
    parser.set_defaults(run=run, refuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Return 2 if a file cannot be read or holds no record."""
    from bench.report.markdown import summary
    from bench.report.page import number_of_chapters, to_page
    from bench.report.tables import to_csv

    try:
        records = [record for path in arguments.records for record in load(path)]
    except (OSError, ValueError) as error:
        print(f"python -m bench report: {error}", file=sys.stderr)
        return 2
    if not records:
        print("python -m bench report: expected a record or more, got none", file=sys.stderr)
        return 2
    name = stem(arguments.records[0])
    make_folder(arguments.refuse, "--output", arguments.output)
    files = {arguments.output / file: text for file, text in summary(name, records).items()}
    follow = partial(
        track, description="drawing", total=number_of_chapters(records), transient=True
    )
    files[arguments.output / f"{name}.html"] = to_page(f"Benchmark {name}", records, follow)
    files[arguments.output / f"{name}.csv"] = to_csv(records)
    for path, content in files.items():
        path.write_text(content, encoding="utf-8")
        print(f"wrote {path}")
    return 0
