"""Does `treeopt compare` tell domains apart?

`python benchmarks/domains.py FOLDER gsm8k.jsonl code.jsonl books.jsonl [--num-prompts 120]`

FILES are prompts as `treeopt calibrate` takes them, a domain each. Every one is calibrated on with the demo model and its
Medusa heads; runs are kept in FOLDER, and a killed benchmark goes on there. Then each plan is judged on every other
domain.
"""

from __future__ import annotations

import argparse
from itertools import permutations
from pathlib import Path

import treeopt
from treeopt.report.wording import per_cent

BUDGET, TOKENS = 16, 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--num-prompts", type=int, default=120)
    asked = parser.parse_args()
    traces = {}
    for file in asked.files:
        run = treeopt.RunDirectory(asked.folder / file.stem)
        if not run.trace.exists():
            options = {"num_prompts": asked.num_prompts, "max_new_tokens": TOKENS, "topks": ()}
            treeopt.calibrate("demo", run=run, prompts=str(file), chat_template=False, **options)
        traces[file.stem] = run.read_trace()
        print(f"{file.stem}: {traces[file.stem].num_sequences} conversations, {len(traces[file.stem].ranks):,} states")
    for a, b in permutations(traces, 2):
        found = treeopt.compare(traces[a], traces[b], budget=BUDGET)
        print(f"{a} -> {b}: the plan loses {per_cent(found.losses[0].loss)} %, keep: {found.keep}")


if __name__ == "__main__":
    main()
