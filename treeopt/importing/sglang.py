"""What SGLang says of each request: the only place where it counts by position.

meta_info                     of /generate, or of a choice with "return_meta_info": true
sglext.spec_tokens_details    of the OpenAI routes, with "return_spec_tokens_details": true; a list with n > 1

The histogram ends at the most that was ever taken, and its index leaves the target's own token out.
spec_accept_length is no mean of it (the prefill's first token is in it), the rate is of tree nodes where
trees are drafted: neither is read. Log, Prometheus and benchmarks have means only, and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from treeopt.errors import InvalidInput
from treeopt.importing.files import File
from treeopt.importing.requests import bodies, choices, gather, read_requests
from treeopt.importing.survival import MOST_DRAFTS, Counted, Drafts

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
ADAPTIVE = (
    "SGLang does not record how long each draft was. If the server adapted its number of steps, "
    "survival is too low, and this cannot be corrected: measure with a fixed --speculative-num-steps."
)
UNLIKELY = 1e-6


def matches(content: Any) -> bool:
    if isinstance(content, str):
        return any(mark in content for mark in MEANS_IN_TEXT)
    return any(details(body) or any(name in body for name in MEANS) for body in bodies(content))


def read(files: Sequence[File]) -> Counted:
    """Drafts over the requests of all files."""
    records: list[dict[str, Any]] = []
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
    counts = read_requests(records, path, skipped=skipped, notes=[ADAPTIVE], is_sparse=True)
    seen = max(len(record.get("acceptance_histogram", ())) - 1 for record in records)
    refuse_trees(counts, seen)
    return counts


def details(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a response says of drafts, once for each choice that says something."""
    return _details_at(body) or [place for choice in choices(body) for place in _details_at(choice)]


def _details_at(one: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The same of the root or of a choice alone; SGLang says it at both if it is asked for both."""
    extension = one.get("sglext")
    extended = extension.get("spec_tokens_details") if isinstance(extension, dict) else None
    for place in (one.get("meta_info"), extended):
        if found := [said for said in (place if isinstance(place, list) else [place]) if _is_of_drafts(said)]:
            return found
    return []


def renamed(place: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a request under their common names; of several names the newest."""
    found = {
        ours: next((place[name] for name in names if place.get(name) is not None), None)
        for ours, names in NAMES.items()
    }
    return {name: value for name, value in found.items() if value is not None}


def _is_of_drafts(place: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(place, dict) and any(name in place for names in NAMES.values() for name in names)


def check_lengths(records: Sequence[Mapping[str, Any]], path: Path) -> None:
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


def refuse_trees(counts: Counted, seen: int) -> None:
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
