"""``python -m tests.engines_live [ENGINE[==VERSION] ...]``: what engines lack of what is used, and a table at the end."""

import sys

from tests.engines_live.check import look, table
from treeopt.export.table import ENGINES


def main(asked: list[str]) -> int:
    packaged = [name for name, engine in ENGINES.items() if engine.package]
    reports = []
    for engine, _, version in (one.partition("==") for one in asked or packaged):
        if engine not in packaged:
            sys.exit(f"An engine must be one of {', '.join(packaged)}, but got {engine!r}.")
        reports.append(look(engine, version or None))
        for line in reports[-1].lines():
            print(line, flush=True)
    print(f"\nNot on the index, and not looked up: {', '.join(name for name in ENGINES if name not in packaged)}.")
    print(f"\n{table(reports)}")
    return any(one.gone for one in reports)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
