"""fastrl's SGLang: SGLang's three flags, or a setting for each range of batch sizes.

configs    "steps_topk_rows", rows with the root; the three flags are one of them
threshold  the first batch size of each range

Its algorithm PREDEFINED takes the settings by their rows, the most first, whatever order they come in. It makes room for
at most `MOST_ROWS` rows of all sequences together. Others of its algorithms try settings out while they serve.
"""

from __future__ import annotations

from itertools import pairwise

from treeopt.engines import chains, sglang
from treeopt.engines.base import Method, Request, ServingEngine, Written
from treeopt.errors import InvalidInput
from treeopt.trees.dynamic import DynamicTree

MOST_ROWS = 2048
ALGORITHM, CONFIGS = "--speculative-eagle-mab-algorithm", "--speculative-eagle-mab-configs"
THRESHOLD = "--speculative-mab-bs-threshold"
UP_TO = "--apdative-speculative-batch-size-threshold"  # as it is spelled there
DRAFTERS = ("eagle3", "eagle")


def write(request: Request) -> Written:
    """SGLang's flags of the first range, then all ranges; above the last that pays it decodes without speculation."""
    drafter = chains.drafter_of(request, DRAFTERS, "fastrl's SGLang")
    settings = chains.merged(request.dynamics)
    off = settings[-1][0] if settings[-1][2] is None else None
    paying = [(begin, tree) for begin, _, tree in settings if tree is not None]
    if not paying:
        return chains.plain(sglang.SERVE, "tree")
    if len(paying) < len(settings) - (off is not None):
        raise InvalidInput(
            f"fastrl's SGLang stops speculating above one batch size, but the plan has {chains.said(settings)}: export "
            "one of them with `batch_size`."
        )
    ends = [end or max(begin, request.batch_size) for begin, end, tree in settings if tree is not None]
    check_room([tree for _, tree in paying], ends)
    if any(before.rows <= after.rows for (_, before), (_, after) in pairwise(paying)):
        raise InvalidInput(
            "fastrl's SGLang gives the settings with the most rows to the smallest batch sizes, but the plan has "
            f"{chains.said(settings)}: export one of them with `batch_size`."
        )
    command = f"{sglang.SERVE}{sglang.drafter_flags(drafter)}{sglang.tree_flags(paying[0][1])}"
    if len(paying) > 1:
        configs = ",".join(f"{tree.levels}_{tree.topk}_{tree.rows}" for _, tree in paying)
        begins = ",".join(str(begin) for begin, _ in paying)
        command += f" {ALGORITHM} PREDEFINED {CONFIGS} {configs} {THRESHOLD} {begins}"
    notes = ["These are options of the SGLang in mit-han-lab/fastrl, third-party/sglang. treeopt has not seen it run."]
    if off is not None:
        command += f" {UP_TO} {off - 1}"
        notes.append(f"It begins to speculate when 10 steps in a row had at most {off - 1} sequences.")
    return chains.launch(command, (*notes, *sglang.tree_notes([tree for _, tree in paying])))


def check_room(trees: list[DynamicTree], batch_sizes: list[int]) -> None:
    """Raise InvalidInput for settings that it would drop."""
    for tree, batch_size in zip(trees, batch_sizes, strict=True):
        if tree.rows * batch_size > MOST_ROWS:
            raise InvalidInput(
                f"fastrl's SGLang verifies at most {MOST_ROWS:,} rows at once, but {tree.rows} rows of {batch_size} "
                f"sequences are {tree.rows * batch_size:,}: search again with `budget={MOST_ROWS // batch_size}`."
            )


ENGINE = ServingEngine(name="fastrl", title="fastrl", methods=(
    Method(name="dynamic-tree", checked="main bce3df7 of 2026-02", dynamic=True, by_batch_size=True, drafters=DRAFTERS,
           rules=("greedy", "sample"), carrier=f"{CONFIGS}, {THRESHOLD} of its SGLang",
           syntax=f"{CONFIGS} 5_4_16,3_2_6 {THRESHOLD} 1,8",
           derived=("algorithm = PREDEFINED", "rows of a range <= those of the one before - 1", "batch x rows <= 2048"),
           source="mit-han-lab/fastrl third-party/sglang/python/sglang/srt/speculative/eagle_mab.py", write=write),
))  # fmt: skip
