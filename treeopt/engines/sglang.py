"""SGLang: a chain or a dynamic tree by three flags, or chains by batch size in an adaptive config; and its counts of drafts.

steps              length of the chain, or levels of the tree
topk               1 for a chain; more makes a tree, whose nodes SGLang itself picks at run time
num-draft-tokens   rows verified, the root included; with topk 1 SGLang sets it to steps + 1 whatever the flag says

SGLang counts by position only in its records of requests:

meta_info                     of /generate, or of a choice with "return_meta_info": true
sglext.spec_tokens_details    of the OpenAI routes, with "return_spec_tokens_details": true; a list with n > 1

The histogram ends at the most that was ever taken, and its index leaves the target's own token out.
spec_accept_length is not read, because the prefill's first token is in it; nor is the rate, which counts
tree nodes if trees are drafted. Log, Prometheus and benchmarks have means only, and are refused.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from treeopt.engines.base import About, Kind, Method, ServingEngine, Written
from treeopt.engines.measured.files import File
from treeopt.engines.measured.requests import Body, bodies, read_requests, records_in
from treeopt.engines.measured.survival import MOST_DRAFTS, CountedDrafts, joined
from treeopt.engines.speculation import Speculation
from treeopt.engines.templates import launch, plain
from treeopt.errors import InvalidInput
from treeopt.files.fields import Amount, Count, Positive
from treeopt.records.plan import Ranges, only
from treeopt.trees.draft import Draft, DynamicLimits
from treeopt.trees.limits import EngineLimits

FILE = "adaptive.json"
ALGORITHMS = {"eagle3": "EAGLE3", "eagle": "EAGLE", "mtp": "NEXTN", "draft-model": "STANDALONE", "ngram": "NGRAM"}
ADAPTIVE = ("eagle3", "eagle", "mtp")  # with any other SGLang logs a warning and stays static
MOST_RUNNING = 48  # sequences that SGLang decodes at once with speculation by default
WHOLE_VOCABULARY = (
    "p/q rejection needs a drafter of the target's whole vocabulary: SGLang does not start with a reduced one."
)
STEPS, TOPK, ROWS = "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens"
LENGTH = {  # by kind of drafter
    "ngram": f" {ROWS} {{rows}} --speculative-ngram-max-bfs-breadth 1",
    **dict.fromkeys(("dflash", "dflash2"), f" {ROWS} {{rows}}"),
    "dspark": " --speculative-dspark-block-size {length}",
}
ONE_SETTING = (
    "A server has these numbers for all batch sizes; what follows the batch, its adaptive config, is for chains."
)
BESIDE_TREES = (
    f"With {TOPK} above 1 SGLang refuses --attention-backend trtllm_mha, and takes a --page-size above 1 with "
    "flashinfer, fa3, triton only."
)
SERVE = "python -m sglang.launch_server --model-path MODEL"


def write(served: Ranges[Draft], about: About) -> Written:
    """One chain for all batch sizes, as flags."""
    length = only(served).depth
    return launch(_chain(about, length), _notes(served, about)) if length else plain(SERVE)


def write_adaptive(served: Ranges[Draft], about: About) -> Written:
    """A length for each range of batch sizes, as an adaptive config with one candidate each."""
    if len(served) == 1:
        return write(served, about)
    config = {str(begin): {"candidate_steps": [draft.depth]} for begin, _, draft in served}
    longest = max(draft.depth for *_, draft in served)
    command = f"{_chain(about, longest)} --speculative-adaptive --speculative-adaptive-config {FILE}"
    ends = ", ".join(str(end) for _, end, _ in served if end is not None)
    notes = [
        *_notes(served, about),
        "SGLang silently keeps one length with topk above 1, attention data parallelism, multi-layer EAGLE, two-batch "
        'overlap or PD multiplexing: look for "speculative_adaptive disabled" in its log.',
        "It pads a batch to its next CUDA graph before it looks the length up: have graphs captured for "
        f"batch sizes {ends}.",
    ]
    if about.drafter == "mtp":
        notes.append("NEXTN is EAGLE to SGLang, except for Gemma 4's assistant, which stays static.")
    return launch(command, notes, {FILE: f"{json.dumps(config)}\n"})


def write_tree(served: Ranges[Draft], about: About) -> Written:
    """One dynamic tree for all batch sizes: three flags."""
    tree = only(served)
    if tree.depth == 0:
        return plain(SERVE, "tree")
    topk = tree.topk or 1
    notes = (ONE_SETTING, *([] if topk == 1 else [BESIDE_TREES]), *_notes(served, about))
    flags = f"{STEPS} {tree.depth} {TOPK} {topk} {ROWS} {tree.rows}"
    return launch(f"{SERVE}{drafter_flags(about.drafter)} {flags}", notes)


def drafter_flags(kind: str) -> str:
    algorithm = f" --speculative-algorithm {ALGORITHMS.get(kind, kind.upper().removesuffix('2'))}"
    return algorithm if kind in ("mtp", "ngram") else f"{algorithm} --speculative-draft-model-path DRAFTER"


def _chain(about: About, length: int) -> str:
    """The launch command for a chain, with a flag for p/q rejection."""
    flags = LENGTH.get(about.drafter, f" {STEPS} {{length}} {TOPK} 1 {ROWS} {{rows}}")
    command = f"{SERVE}{drafter_flags(about.drafter)}{flags.format(length=length, rows=length + 1)}"
    return f"{command} --speculative-use-rejection-sampling" if about.rule == "reject" else command


def _notes(served: Ranges[Draft], about: About) -> list[str]:
    """Notes on p/q rejection, and on more sequences than SGLang decodes at once by default."""
    notes = [WHOLE_VOCABULARY] if about.rule == "reject" else []
    most = max(about.batch_size, served[-1][0])
    if most > MOST_RUNNING:
        notes.append(
            f"With speculation SGLang decodes {MOST_RUNNING} sequences at once: pass --max-running-requests {most}."
        )
    return notes


FORMS = ("meta_info", "sglext.spec_tokens_details")
PLACES = (
    *FORMS,
    *(f"choices.{form}" for form in FORMS),
)  # of records; a request for both forms gets them at both places
MEANS = ("accept_length", "acc_length", "internal_states", "avg_spec_accept_length")
MEANS_IN_TEXT = ("accept len: ", "accept rate: ", "sglang:spec_")
ASK = (
    "save the responses of /generate of a newer SGLang, whose meta_info has a histogram of each request "
    '(spec_correct_drafts_histogram), or ask the OpenAI routes for it with "return_spec_tokens_details": true'
)
UNKNOWN_LENGTHS = (
    "SGLang does not record how long each draft was. If the server adapted its number of steps, "
    "survival is too low, and this cannot be corrected: measure with a fixed --speculative-num-steps."
)
UNLIKELY = 1e-6


def is_of_drafts(content: Any) -> bool:
    if isinstance(content, str):
        return any(mark in content for mark in MEANS_IN_TEXT)
    return any(records_in(body, PLACES) or any(name in body for name in MEANS) for body in bodies(content))


def read_drafts(files: Sequence[File]) -> CountedDrafts:
    longest = 0
    for content, path in files:
        records = [record for body in bodies(content) for record in records_in(body, PLACES)]
        check_lengths(records, path)
        histograms = [record.get("acceptance_histogram") for record in records]
        longest = max([longest, *(len(counts) for counts in histograms if isinstance(counts, list | dict))])
    counts = read_requests(files, PLACES, ask=ASK, notes=[UNKNOWN_LENGTHS])
    refuse_trees(counts, longest - 1)
    return counts


def check_lengths(records: Sequence[Body], path: Path) -> None:
    """Raise InvalidInput if requests were drafted different numbers of tokens per step."""
    lengths = set()
    for record in records:
        drafted, steps = record.get("num_draft_tokens"), record.get("num_spec_steps")
        if isinstance(drafted, int) and isinstance(steps, int) and 0 <= drafted <= MOST_DRAFTS and steps > 0:
            lengths.add(drafted / min(steps, MOST_DRAFTS))
    if len(lengths) > 1:
        raise InvalidInput(
            f"{path} must be of drafts of one length, but its requests were proposed {min(lengths):g} to {max(lengths):g} tokens a "
            "step: the server adapted its number of steps, and SGLang does not count which draft had which. Measure with a "
            "fixed --speculative-num-steps, a file for each."
        )


def refuse_trees(counts: CountedDrafts, deepest: int) -> None:
    """Raise InvalidInput if more tokens were proposed per step than were ever accepted: those are trees.

    deepest : the deepest guess that the histograms have an entry for

    With --speculative-eagle-topk above 1 the proposed tokens are the nodes of a tree. A tree is less deep than it has
    nodes, and an accepted path may have any ranks: it does not tell the survival of the first guesses.
    """
    tried, passed, _ = joined(counts.groups)
    depths = tried.sum(0) > 0
    tried, passed = (rows.sum(0)[depths] for rows in (tried, passed))
    last = len(tried) - 1
    if last < 1 or passed[last] or deepest > last:
        return
    before = passed[last - 1] / tried[last - 1]
    if (1 - before / 2) ** int(tried[last]) < UNLIKELY:
        raise InvalidInput(
            f"{counts.path} must be of chains, but more tokens were proposed a step than depth {last}, and of "
            f"{tried[last]:.0f} steps that accepted so much none went on: these look like trees, which do not tell how good "
            "the first guesses are. Measure with --speculative-eagle-topk 1 and a fixed --speculative-num-steps."
        )


class SpeculationTimed(BaseModel):
    """A line of bench_speculative.py, for which all of steps, topk and num_draft_tokens are 0 without speculation.

    num_draft_tokens : rows verified, the root included
    step_time        : of a whole step [s], the 20th percentile
    speed            : tokens per second of one request
    """

    batch_size: Positive
    steps: Count
    topk: Count = 1
    num_draft_tokens: Count
    step_time: Amount
    acc_length: Amount | None = None
    speed: Amount | None = None
    completion_tokens: Amount | None = None

    @property
    def size(self) -> int:
        return max(1, self.num_draft_tokens)

    @property
    def depth(self) -> int:
        return min(self.steps, self.size - 1)


KIND = Kind("responses of SGLang with meta_info or sglext", is_of_drafts, read_drafts)
FLAGS = "--speculative-num-steps, -eagle-topk, -num-draft-tokens"
HOOK, PACKAGE = "sgl-project/sglang python/sglang/srt/arg_groups/speculative_hook.py", "python/sglang/srt/speculative"
TREES = EngineLimits(dynamic=DynamicLimits())
method = partial(Method, checked="0.5.23")
OPTIONS = Speculation(
    program="sglang",
    flags=r"--speculative-\S+",
    named_by="--speculative-algorithm",
    lengths={
        "NGRAM|DFLASH": f"{ROWS} {{rows}}",
        "DSPARK": "--speculative-dspark-block-size {length}",
        ".*": f"{STEPS} {{length}} {TOPK} 1 {ROWS} {{rows}}",
    },
)
ENGINE = ServingEngine(
    name="sglang", title="SGLang", package="sglang", server="python -m sglang.launch_server", options=OPTIONS,
    imports={"sglang": KIND}, methods=(
    method(name="adaptive", drafters=ADAPTIVE, rules=("greedy", "sample", "reject"),
           carrier="--speculative-adaptive-config", by_batch_size=True,
           source=f"sgl-project/sglang {PACKAGE}/adaptive_spec_params.py, {PACKAGE}/eagle_utils.py", write=write_adaptive),
    method(name="steps", drafters=tuple(ALGORITHMS), rules=("greedy", "sample"), carrier=FLAGS,
           looks_up="in a trie of all answers, with the last 18 tokens of every prompt",
           source=HOOK, write=write),
    method(name="dynamic-tree", limits=TREES, drafters=ADAPTIVE, rules=("greedy", "sample"), carrier=FLAGS, write=write_tree,
           source=f"{HOOK}, {PACKAGE}/spec_utils.py"),
    method(name="dflash", drafters=("dflash", "dflash2"), rules=("greedy", "sample"), carrier="--speculative-num-draft-tokens",
           source=f"{HOOK}, {PACKAGE}/dflash_utils.py", write=write),
    method(name="dspark", drafters=("dspark",), carrier="--speculative-dspark-block-size",
           source=HOOK, write=write),
))  # fmt: skip
