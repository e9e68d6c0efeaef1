"""SGLang: a chain or a dynamic tree by three flags, or chains by batch size from an adaptive config; and what it counts.

steps              length of the chain, or levels of the tree
topk               1 for a chain; more makes a tree, whose nodes SGLang itself picks at run time
num-draft-tokens   rows verified, the root included; with topk 1 SGLang sets it to steps + 1 whatever is asked

Only what it says of requests counts by position:

meta_info                     of /generate, or of a choice with "return_meta_info": true
sglext.spec_tokens_details    of the OpenAI routes, with "return_spec_tokens_details": true; a list with n > 1

The histogram ends at the most that was ever taken, and its index leaves the target's own token out.
spec_accept_length is no mean of it (the prefill's first token is in it), the rate is of tree nodes where
trees are drafted: neither is read. Log, Prometheus and benchmarks have means only, and are refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

from treeopt.engines import chains
from treeopt.engines.base import Kind, Method, Request, ServingEngine, Written
from treeopt.engines.measured.files import File
from treeopt.engines.measured.requests import Body, bodies, choices, gather, read_requests
from treeopt.engines.measured.survival import MOST_DRAFTS, CountedDrafts, Drafts
from treeopt.errors import InvalidInput
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
    tree = chains.only_setting(request, "SGLang")
    if tree is None:
        return chains.plain(SERVE, "tree")
    notes = (ONE_SETTING, *tree_notes([tree]), *_running(request))
    return chains.launch(f"{SERVE}{drafter_flags(drafter)}{tree_flags(tree)}", notes)


def tree_flags(tree: DynamicTree) -> str:
    return f" {STEPS} {tree.levels} {TOPK} {tree.topk} {ROWS} {tree.rows}"


def tree_notes(trees: Sequence[DynamicTree]) -> list[str]:
    """Notes on what SGLang asks of a server whose trees are no chains."""
    if all(tree.topk == 1 for tree in trees):
        return []
    return [
        f"With {TOPK} above 1 SGLang refuses --attention-backend trtllm_mha, and takes a --page-size above 1 with "
        f"{', '.join(PAGED)} only."
    ]


def write_block(request: Request) -> Written:
    """One length of a block for all batch sizes; DFlash's counts the root."""
    drafter = chains.drafter_of(request, LENGTH_OF_BLOCKS, "SGLang's drafters of blocks")
    length = chains.only_length(request, f"SGLang with the drafter {drafter}")
    if length == 0:
        return chains.plain(SERVE)
    options = f"--speculative-algorithm {drafter.upper()} --speculative-draft-model-path DRAFTER"
    command = f"{SERVE} {options} {LENGTH_OF_BLOCKS[drafter]} {length + (drafter == 'dflash')}"
    return chains.launch(command, _running(request))


def drafter_flags(drafter: str) -> str:
    own = "" if drafter in ("mtp", "ngram") else " --speculative-draft-model-path DRAFTER"
    return f" --speculative-algorithm {ALGORITHMS[drafter]}{own}"


def _rule_flag(request: Request) -> str:
    """p/q rejection, which the workers of EAGLE and MTP have; else SGLang samples and compares."""
    return " --speculative-use-rejection-sampling" if request.rule == "reject" else ""


def _running(request: Request) -> list[str]:
    """A note on a plan for more sequences than SGLang decodes at once unless told otherwise."""
    most = max(request.batch_size, (request.lengths or request.dynamics)[-1][0])
    said = f"With speculation SGLang decodes {MOST_RUNNING} sequences at once: pass --max-running-requests {most}."
    return [said] if most > MOST_RUNNING else []


def _steps_flags(drafter: str, steps: int) -> str:
    if drafter == "ngram":
        return f" {ROWS} {steps + 1} --speculative-ngram-max-bfs-breadth 1"
    return f" {STEPS} {steps} {TOPK} 1 {ROWS} {steps + 1}"


NAMES = {  # the newest first; the older ones are to be removed or have been
    "acceptance_histogram": ("spec_correct_drafts_histogram", "spec_accept_histogram"),
    "num_spec_steps": ("spec_verify_ct",),
    "num_accepted_draft_tokens": ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num"),
    "num_draft_tokens": ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num"),
}
MEANS = ("accept_length", "acc_length", "internal_states", "avg_spec_accept_length")
MEANS_IN_TEXT = ("accept len: ", "accept rate: ", "sglang:spec_")
ASK = (
    "save the responses of /generate, whose meta_info has a histogram of each request, or ask the OpenAI routes for "
    'it with "return_spec_tokens_details": true'
)
UNKNOWN_LENGTHS = (
    "SGLang does not record how long each draft was. If the server adapted its number of steps, "
    "survival is too low, and this cannot be corrected: measure with a fixed --speculative-num-steps."
)
UNLIKELY = 1e-6


def is_of_drafts(content: Any) -> bool:
    if isinstance(content, str):
        return any(mark in content for mark in MEANS_IN_TEXT)
    return any(details(body) or any(name in body for name in MEANS) for body in bodies(content))


def read_drafts(files: Sequence[File]) -> CountedDrafts:
    """Drafts over the requests of all files."""
    records: list[Body] = []
    skipped = 0
    for file in files:
        found, missing = gather([file], details)
        path = file[1]
        if not found:
            raise InvalidInput(
                f"{path} has only means of its drafts: survival needs counts by position. Instead, {ASK}."
            )
        of_file = [renamed(place) for place in found]
        check_lengths(of_file, path)
        records += of_file
        skipped += missing
    if not any("acceptance_histogram" in record for record in records):
        raise InvalidInput(
            f"{path} has no histograms (spec_correct_drafts_histogram): this SGLang, or its setting, counts means only. "
            f"Update it, and {ASK}."
        )
    counts = read_requests(records, path, skipped=skipped, notes=[UNKNOWN_LENGTHS], is_sparse=True)
    seen = max(len(record.get("acceptance_histogram", ())) - 1 for record in records)
    refuse_trees(counts, seen)
    return counts


def details(body: Body) -> list[Body]:
    """Records of drafts in a response, once for each choice that says something."""
    return _details_at(body) or [place for choice in choices(body) for place in _details_at(choice)]


def _details_at(one: Body) -> list[Body]:
    """Records of drafts at the root of a response or at a choice; SGLang has them at both if it is asked for both."""
    extension = one.get("sglext")
    extended = extension.get("spec_tokens_details") if isinstance(extension, dict) else None
    for place in (one.get("meta_info"), extended):
        if found := [said for said in (place if isinstance(place, list) else [place]) if _is_of_drafts(said)]:
            return found
    return []


def renamed(place: Body) -> Body:
    """The figures of a request under their common names; of several names the newest."""
    found = {
        ours: next((place[name] for name in names if place.get(name) is not None), None)
        for ours, names in NAMES.items()
    }
    return {name: value for name, value in found.items() if value is not None}


def _is_of_drafts(place: Any) -> TypeGuard[Body]:
    return isinstance(place, dict) and any(name in place for names in NAMES.values() for name in names)


def check_lengths(records: Sequence[Body], path: Path) -> None:
    """InvalidInput where requests of one server were proposed different numbers of tokens a step: it adapted them."""
    each = set()
    for record in records:
        drafted, steps = record.get("num_draft_tokens"), record.get("num_spec_steps")
        if isinstance(drafted, int) and isinstance(steps, int) and 0 <= drafted <= MOST_DRAFTS and steps > 0:
            each.add(drafted / min(steps, MOST_DRAFTS))
    if len(each) > 1:
        raise InvalidInput(
            f"{path} must be of drafts of one length, but its requests were proposed {min(each):g} to {max(each):g} tokens a "
            "step: the server adapted its number of steps, and SGLang does not count which draft had which. Measure with a "
            "fixed --speculative-num-steps, a file for each."
        )


def refuse_trees(counts: CountedDrafts, seen: int) -> None:
    """InvalidInput where more was proposed a step than was ever accepted, which chance does not explain.

    seen : depth that the histograms have entries for

    With --speculative-eagle-topk above 1 the proposed tokens are the nodes of a tree, which is less deep
    than it has nodes, and accepted is a path of any ranks: not the survival of the first guesses.
    """
    drafts = Drafts.of(counts.groups)
    depths = drafts.tried.sum(0) > 0
    tried, passed = (rows.sum(0)[depths] for rows in (drafts.tried, drafts.passed))
    last = len(tried) - 1
    if last < 1 or passed[last] or seen > last:
        return
    before = passed[last - 1] / tried[last - 1]
    if (1 - before / 2) ** int(tried[last]) < UNLIKELY:
        raise InvalidInput(
            f"{counts.path} must be of chains, but more tokens were proposed a step than depth {last}, and of {tried[last]:.0f} "
            "steps that accepted so much none went on: these look like trees, whose accepted depth does not say how good "
            "the first guesses are. Measure with --speculative-eagle-topk 1 and a fixed --speculative-num-steps."
        )


KIND = Kind("responses of SGLang with meta_info or sglext", is_of_drafts, read_drafts, takes_several=True)
FLAGS = "--speculative-num-steps, -eagle-topk, -num-draft-tokens"
HOOK, PACKAGE = "sgl-project/sglang python/sglang/srt/arg_groups/speculative_hook.py", "python/sglang/srt/speculative"
CHAIN_FLAGS = ("eagle-topk = 1", "num-draft-tokens = steps + 1")
ENGINE = ServingEngine(name="sglang", title="SGLang", package="sglang", imports={"sglang": KIND}, methods=(
    Method(name="adaptive", checked="0.5.23", drafters=ADAPTIVE, rules=("greedy", "sample", "reject"),
           carrier="--speculative-adaptive-config", syntax='{"1": {"candidate_steps": [5]}, "8": {"candidate_steps": [3]}}',
           derived=CHAIN_FLAGS, by_batch_size=True,
           source=f"sgl-project/sglang {PACKAGE}/adaptive_spec_params.py, {PACKAGE}/eagle_utils.py", write=write_adaptive),
    Method(name="steps", checked="0.5.23", drafters=tuple(ALGORITHMS), rules=("greedy", "sample"), carrier=FLAGS,
           syntax="--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
           derived=CHAIN_FLAGS, source=HOOK, write=write),
    Method(name="dynamic-tree", checked="0.5.23", dynamic=True, drafters=ADAPTIVE, rules=("greedy", "sample"), carrier=FLAGS,
           syntax="--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16",
           derived=("num-draft-tokens = rows", "num-draft-tokens - 1 <= pool"), source=f"{HOOK}, {PACKAGE}/spec_utils.py",
           write=write_tree),
    Method(name="dflash", checked="0.5.23", drafters=("dflash",), rules=("greedy", "sample"),
           carrier="--speculative-num-draft-tokens",
           syntax="--speculative-algorithm DFLASH --speculative-num-draft-tokens 4",
           derived=("num-draft-tokens = length + 1",), source=f"{HOOK}, {PACKAGE}/dflash_utils.py", write=write_block),
    Method(name="dspark", checked="0.5.23", drafters=("dspark",), carrier="--speculative-dspark-block-size",
           syntax="--speculative-algorithm DSPARK --speculative-dspark-block-size 3", source=HOOK, write=write_block),
))  # fmt: skip
