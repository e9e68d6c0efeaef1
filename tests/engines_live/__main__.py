"""``python -m tests.engines_live [ENGINE[==VERSION] ...]``: what engines lack of what is used, and a table at the end."""

import signal
import sys

from tests.engines_live.check import Report, look, table
from treeopt.engines.registry import ENGINES


def main(asked: list[str]) -> int:
    """0 where nothing is gone, 1 where something is or nothing could be looked up; the table comes whatever happens."""
    packaged = [name for name, engine in ENGINES.items() if engine.package]
    wanted = [one.partition("==")[::2] for one in asked or packaged]
    for engine, _ in wanted:
        if engine not in packaged:
            sys.exit(f"An engine must be one of {', '.join(packaged)}, but got {engine!r}.")
    reports: list[Report] = []
    try:
        for engine, version in wanted:
            reports.append(look(engine, version or None))
            for line in reports[-1].lines():
                print(line, flush=True)
    finally:
        print(f"\nNot on the index, and not looked up: {', '.join(name for name in ENGINES if name not in packaged)}.")
        print(f"\n{table(reports)}", flush=True)
        if not any(one.words for one in reports):
            print("\nNothing was looked up: no release could be read.")
    return any(one.gone for one in reports) or not any(one.words for one in reports)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("The time was up before every engine was looked up."))
    sys.exit(main(sys.argv[1:]))
