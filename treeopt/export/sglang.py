"""SGLang: a chain or a dynamic tree by three flags, or chains by batch size from an adaptive config.

steps              length of the chain, or levels of the tree
topk               1 for a chain; more makes a tree, whose nodes SGLang itself picks at run time
num-draft-tokens   rows verified, the root included; with topk 1 SGLang sets it to steps + 1 whatever is asked
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from treeopt.errors import InvalidInput
from treeopt.export import chains, dynamic
from treeopt.export.engine import Lengths, Request, Settings, Written
from treeopt.trees.dynamic import DynamicTree

FILE = "adaptive.json"
ALGORITHMS = {"eagle3": "EAGLE3", "eagle": "EAGLE", "mtp": "NEXTN", "draft-model": "STANDALONE", "ngram": "NGRAM"}
LENGTH_OF_BLOCKS = {"dflash": "--speculative-num-draft-tokens", "dspark": "--speculative-dspark-block-size"}
ADAPTIVE = ("eagle3", "eagle", "mtp")  # with any other SGLang logs a warning and stays static
MOST_RUNNING = 48  # sequences that SGLang decodes at once with speculation, unless told otherwise
WHOLE_VOCABULARY = (
    "p/q rejection needs a drafter of the target's whole vocabulary: SGLang does not start with a reduced one.",
)
STEPS, TOPK, ROWS = "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens"
LOSSY = ("--speculative-accept-threshold-single", "--speculative-accept-threshold-acc")  # 1 by default
PAGED = ("flashinfer", "fa3", "triton")  # backends of attention whose pages may have several tokens with a tree
ONE_SETTING = (
    "A server has these numbers for all batch sizes; what follows the batch, its adaptive config, is for chains."
)
SERVE = "python -m sglang.launch_server --model-path MODEL"


def write(request: Request) -> Written:
    """One length for all batch sizes: three flags."""
    drafter = chains.drafter_of(request, ALGORITHMS, "SGLang")
    steps = chains.only_length(request, f"SGLang with the drafter {drafter}")
    if steps == 0:
        return chains.plain(SERVE)
    command = f"{SERVE}{drafter_flags(drafter)}{_steps_flags(drafter, steps)}{_rule_flag(request)}"
    return chains.launch(command, (*WHOLE_VOCABULARY * (request.rule == "reject"), *_running(request)))


def write_adaptive(request: Request) -> Written:
    """A length for each range of batch sizes, as an adaptive config with one candidate each."""
    drafter = chains.drafter_of(request, ADAPTIVE, "SGLang's adaptive config")
    lengths = chains.merged(request.lengths)
    if len(lengths) == 1:
        return write(request)
    steps = max(length for _, _, length in lengths)
    config = {str(begin): {"candidate_steps": [length]} for begin, _, length in lengths}
    command = (
        f"{SERVE}{drafter_flags(drafter)}{_steps_flags(drafter, steps)}{_rule_flag(request)} "
        f"--speculative-adaptive --speculative-adaptive-config {FILE}"
    )
    ends = ", ".join(str(end) for _, end, _ in lengths if end is not None)
    notes = [
        *WHOLE_VOCABULARY * (request.rule == "reject"),
        *_running(request),
        "SGLang silently keeps one length with topk above 1, attention data parallelism, multi-layer EAGLE, two-batch "
        'overlap or PD multiplexing: look for "speculative_adaptive disabled" in its log.',
        "It pads a batch to its next CUDA graph before it looks the length up: have graphs captured for "
        f"batch sizes {ends}.",
    ]
    if drafter == "mtp":
        notes.append("NEXTN is EAGLE to SGLang, except for Gemma 4's assistant, which stays static.")
    return chains.launch(command, notes, {FILE: f"{json.dumps(config)}\n"})


def write_tree(request: Request) -> Written:
    """One dynamic tree for all batch sizes: three flags."""
    drafter = chains.drafter_of(request, ADAPTIVE, "SGLang's dynamic trees")
    tree = dynamic.only_setting(request, "SGLang")
    if tree is None:
        return chains.plain(SERVE, "tree")
    notes = (ONE_SETTING, *tree_notes([tree]), *_running(request))
    return chains.launch(f"{SERVE}{drafter_flags(drafter)}{tree_flags(tree)}", notes)


def tree_flags(tree: DynamicTree) -> str:
    return f" {STEPS} {tree.levels} {TOPK} {tree.topk} {ROWS} {tree.rows}"


def tree_notes(trees: Sequence[DynamicTree]) -> list[str]:
    """What SGLang asks of a server whose trees are no chains."""
    if all(tree.topk == 1 for tree in trees):
        return []
    return [
        f"With {TOPK} above 1 SGLang refuses --attention-backend trtllm_mha, and takes a --page-size above 1 with "
        f"{', '.join(PAGED)} only."
    ]


def parse_tree(files: Mapping[str, str]) -> Settings:
    """The dynamic tree as SGLang builds it, a chain with topk 1.

    Raises InvalidInput for what it refuses, for more rows than the pool has, on which it fails at the first step, and for
    thresholds that make it accept what the target would not have said.
    """
    given = chains.flags(files)
    if "--speculative-algorithm" not in given:
        return dynamic.NO_SPECULATION
    if lossy := [name for name in LOSSY if given.get(name, "1") not in ("1", "1.0")]:
        raise InvalidInput(f"{' and '.join(lossy)} below 1 changes what is generated: leave it out.")
    steps, topk, rows = dynamic.numbers(given, STEPS, TOPK, ROWS)
    backend = given.get("--attention-backend")
    if topk > 1 and (backend == "trtllm_mha" or (given.get("--page-size", "1") != "1" and backend not in PAGED)):
        raise InvalidInput(tree_notes([DynamicTree(steps, topk, rows)])[0])
    return ((1, None, DynamicTree(steps, topk, steps + 1 if topk == 1 else rows)),)


def write_block(request: Request) -> Written:
    """One length of a block for all batch sizes; DFlash's counts the root."""
    drafter = chains.drafter_of(request, LENGTH_OF_BLOCKS, "SGLang's drafters of blocks")
    length = chains.only_length(request, f"SGLang with the drafter {drafter}")
    if length == 0:
        return chains.plain(SERVE)
    options = f"--speculative-algorithm {drafter.upper()} --speculative-draft-model-path DRAFTER"
    command = f"{SERVE} {options} {LENGTH_OF_BLOCKS[drafter]} {length + (drafter == 'dflash')}"
    return chains.launch(command, _running(request))


def parse(files: Mapping[str, str]) -> Lengths:
    """The chain lengths as SGLang reads flags and config, its silent static fallback included.

    Raises InvalidInput for what it refuses, and for topk above 1, which makes no chain.
    """
    given = chains.flags(files)
    algorithm = given.get("--speculative-algorithm")
    if algorithm is None:
        return chains.NO_SPECULATION
    if algorithm == "DSPARK":
        name = LENGTH_OF_BLOCKS["dspark"]
        return ((1, None, chains.whole(given.get(name, ""), name)),)
    if algorithm == "DFLASH":
        name = LENGTH_OF_BLOCKS["dflash"]
        return ((1, None, chains.whole(given.get(name, "16"), name) - 1),)
    if algorithm == "NGRAM":
        rows = chains.whole(given.get(ROWS, "12"), ROWS)
        return ((1, None, rows - 1),)
    steps, topk = dynamic.numbers(given, STEPS, TOPK)
    if "--speculative-adaptive" in given and is_adaptive(algorithm, topk):
        slots = slots_of(files.get(FILE, ""))
        if steps not in slots.values():
            raise InvalidInput(f"{STEPS} must be one of the candidate_steps, but is {steps}.")
        return chains.ranges_of(lambda batch_size: chains.length_at(slots, batch_size))
    if topk != 1:
        raise InvalidInput(f"A chain needs {TOPK} 1, but got {topk}.")
    return ((1, None, steps),)


def is_adaptive(algorithm: str, topk: int) -> bool:
    """Whether SGLang heeds ``--speculative-adaptive``; where not it warns in its log, and stays static.

    NEXTN is another name of EAGLE.

    >>> is_adaptive("EAGLE3", 1), is_adaptive("EAGLE3", 4), is_adaptive("STANDALONE", 1)
    (True, False, False)
    """
    return algorithm in [ALGORITHMS[drafter] for drafter in ADAPTIVE] and topk == 1


def slots_of(text: str) -> dict[int, int]:
    """Lower bound of batch sizes to steps; InvalidInput where SGLang refuses, or would choose by itself.

    >>> slots_of('{"8": {"candidate_steps": [1]}, "strategy": "ema", "1": {"candidate_steps": [3]}}')
    {8: 1, 1: 3}
    """
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInput(f"An adaptive config must be JSON: {error}.") from None
    if not isinstance(config, dict):
        raise InvalidInput(f"An adaptive config must be a JSON object, but is {config!r}.")
    slots: dict[int, int] = {}
    for key, entry in config.items():
        if not key.isdigit():
            continue  # a setting for all batch sizes
        steps = entry.get("candidate_steps") if isinstance(entry, dict) else None
        if not isinstance(steps, list) or not steps or not all(type(s) is int and s >= 0 for s in steps):
            raise InvalidInput(f"Batch size {key} needs candidate_steps of at least 0, but has {steps!r}.")
        if len(set(steps)) > 1:
            raise InvalidInput(f"SGLang chooses among candidate_steps {steps} at run time: leave one of them.")
        slots[int(key)] = steps[0]
    if not slots:
        raise InvalidInput('An adaptive config needs a batch size, as in {"1": {"candidate_steps": [3]}}.')
    return slots


def drafter_flags(drafter: str) -> str:
    own = "" if drafter in ("mtp", "ngram") else " --speculative-draft-model-path DRAFTER"
    return f" --speculative-algorithm {ALGORITHMS[drafter]}{own}"


def _rule_flag(request: Request) -> str:
    """p/q rejection, which the workers of EAGLE and MTP have; else SGLang samples and compares."""
    return " --speculative-use-rejection-sampling" if request.rule == "reject" else ""


def _running(request: Request) -> list[str]:
    """What is to be said of a plan for more sequences than SGLang decodes at once unless told otherwise."""
    most = max(request.batch_size, (request.lengths or request.dynamics)[-1][0])
    said = f"With speculation SGLang decodes {MOST_RUNNING} sequences at once: pass --max-running-requests {most}."
    return [said] if most > MOST_RUNNING else []


def _steps_flags(drafter: str, steps: int) -> str:
    if drafter == "ngram":
        return f" {ROWS} {steps + 1} --speculative-ngram-max-bfs-breadth 1"
    return f" {STEPS} {steps} {TOPK} 1 {ROWS} {steps + 1}"
