"""``python -m tests.answers [--write] [NAME...]``: say which answers moved, and write the book anew where asked to."""

import sys

from .book import BOOK, answer_of, moves, write, written
from .cases import CASES


def main(words: list[str]) -> int:
    names = [word for word in words if word != "--write"] or [*CASES]
    moved = 0
    for name in names:
        answer = answer_of(name)
        found = list(moves(written(name), answer)) if (BOOK / f"{name}.json").exists() else [("is new", float("inf"))]
        moved += bool(found)
        for sentence, errors in found:
            print(f"{name}: {sentence}{'' if errors <= 1 else '  <-- beyond its error'}")
        if "--write" in words:
            write(name, answer)
    print(f"{len(names)} answers, {moved} moved{', written' if '--write' in words else ''}.")
    return 0 if "--write" in words or not moved else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
