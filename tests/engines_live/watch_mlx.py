"""mlx-lm's server with these arguments; after each answer it prints a line with the number of tokens of every step."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any


def main() -> None:
    from mlx_lm import server

    own = server.stream_generate

    def stream_generate(*args: Any, **options: Any) -> Iterator[Any]:
        steps = [0]
        try:
            for answer in own(*args, **options):
                steps[-1] += 1
                if not answer.from_draft:  # the target's own token is the last of a step
                    steps.append(0)
                yield answer
        finally:
            print(json.dumps({"version": server.__version__, "steps": steps}), flush=True)

    server.stream_generate = stream_generate
    sys.exit(server.main())


if __name__ == "__main__":
    main()
