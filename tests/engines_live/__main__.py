"""``python -m tests.engines_live [ENGINE ...]``: what is gone from the newest engines, and a table at the end."""

import sys

from tests.engines_live.check import look, table
from treeopt.export.table import ENGINES


def main(asked: list[str]) -> int:
    reports = []
    for engine in asked or [name for name, one in ENGINES.items() if one.package]:
        reports.append(look(engine))
        print(*reports[-1].lines(), sep="\n", end="\n" if reports[-1].lines() else "", flush=True)
    elsewhere = ", ".join(name for name, one in ENGINES.items() if not one.package)
    print(f"\nNot on the index, and not looked up: {elsewhere}.\n\n{table(reports)}")
    return any(one.gone for one in reports)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
