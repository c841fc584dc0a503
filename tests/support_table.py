"""The README's table of model families, made from the list that the tests run.

python tests/support_table.py --check README.md     exit status 1 if the table there is another
python tests/support_table.py --write README.md     put it there
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tabulate import tabulate

from families import FAMILIES

START, END = "<!-- families -->", "<!-- /families -->"


def table() -> str:
    """Markdown: family, what its tiny test model has rewritten and exact, lanes in decode, remarks."""
    rows = [
        (
            family.name,
            f"{family.rewritten} of {family.rewritten + family.exact}",
            {2: "two", 1: "one"}[family.lanes] if family.rewritten else "–",
            family.note,
        )
        for family in FAMILIES
    ]
    headers = ("family", "attentions rewritten", "lanes", "")
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", type=Path, metavar="FILE")
    action.add_argument("--write", type=Path, metavar="FILE")
    args = parser.parse_args()
    path = args.check or args.write
    text = path.read_text()
    before, rest = text.split(START)
    after = rest.split(END)[1]
    wanted = f"{before}{START}\n{table()}\n{END}{after}"
    if args.write:
        path.write_text(wanted)
    elif text != wanted:
        print(
            f"{path}: the table of families is out of date: python tests/support_table.py --write {path}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
