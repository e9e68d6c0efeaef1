"""fastrl's SGLang: SGLang's three flags, or a setting for each range of batch sizes.

configs    "steps_topk_rows", rows with the root; the three flags are one of them
threshold  the first batch size of each range

Its algorithm PREDEFINED takes the settings by their rows, the most first, whatever order they come in. It makes room for
at most `MOST_ROWS` rows of all sequences together. Others of its algorithms try settings out while they serve.
"""

from itertools import pairwise

from treeopt.engines import chains, sglang
from treeopt.engines.base import Method, Request, ServingEngine, Written
from treeopt.errors import InvalidInput

MOST_ROWS = 2048
ALGORITHM, CONFIGS = "--speculative-eagle-mab-algorithm", "--speculative-eagle-mab-configs"
THRESHOLD = "--speculative-mab-bs-threshold"
UP_TO = "--apdative-speculative-batch_size-threshold"  # as it is spelled there
DRAFTERS = ("eagle3", "eagle")


def write(request: Request) -> Written:
    """SGLang's flags of the first range, then all ranges; above the last that pays it decodes without speculation."""
    settings = chains.merged(request.dynamics)
    off = settings[-1][0] if settings[-1][2] is None else None
    paying = [(begin, end or max(begin, request.batch_size), tree) for begin, end, tree in settings if tree]
    trees = [tree for *_, tree in paying]
    if not trees:
        return chains.plain(sglang.SERVE, "tree")
    reason = ""
    if len(trees) < len(settings) - (off is not None):
        reason = "stops speculating above one batch size"
    elif any(before.rows <= after.rows for before, after in pairwise(trees)):
        reason = "gives the settings with the most rows to the smallest batch sizes"
    if reason:
        raise InvalidInput(
            f"fastrl's SGLang {reason}, but the plan has {chains.said(settings)}: export one of them with `batch_size`."
        )
    for _, size, tree in paying:
        if tree.rows * size > MOST_ROWS:
            raise InvalidInput(
                f"fastrl's SGLang verifies at most {MOST_ROWS:,} rows at once, but {tree.rows} rows of {size} "
                f"sequences are {tree.rows * size:,}: search again with `budget={MOST_ROWS // size}`."
            )
    command = f"{sglang.SERVE}{sglang.drafter_flags(request.kind)}{sglang.tree_flags(trees[0])}"
    if len(trees) > 1:
        configs = ",".join(f"{tree.levels}_{tree.topk}_{tree.rows}" for tree in trees)
        begins = ",".join(str(begin) for begin, *_ in paying)
        command += f" {ALGORITHM} PREDEFINED {CONFIGS} {configs} {THRESHOLD} {begins}"
    notes = ["These are options of the SGLang in mit-han-lab/fastrl, third-party/sglang. treeopt has not seen it run."]
    if off is not None:
        command += f" {UP_TO} {off - 1}"
        notes.append(f"It begins to speculate when 10 steps in a row had at most {off - 1} sequences.")
    return chains.launch(command, (*notes, *sglang.tree_notes(trees)))


ENGINE = ServingEngine(name="fastrl", title="fastrl", methods=(
    Method(name="dynamic-tree", checked="main bce3df7 of 2026-02", dynamic=True, by_batch_size=True, drafters=DRAFTERS,
           rules=("greedy", "sample"), carrier=f"{CONFIGS}, {THRESHOLD} of its SGLang",
           syntax=f"{CONFIGS} 5_4_16,3_2_6 {THRESHOLD} 1,8",
           derived=("algorithm = PREDEFINED", "rows of a range <= those of the one before - 1", "batch x rows <= 2048"),
           source="mit-han-lab/fastrl third-party/sglang/python/sglang/srt/speculative/eagle_mab.py", write=write),
))  # fmt: skip
