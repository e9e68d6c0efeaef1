"""TensorRT-LLM's PyTorch backend: a chain length, ``draft_len_schedule`` by batch size, or a dynamic tree.

Two meanings of the same keys have been released, and nothing in the file tells them apart:

upper-bound   {4: 4, 8: 2}  up to 4: 4, 5 to 8: 2, above: 0      since PR #10860 of January 2026
lower-bound   {1: 4, 4: 2}  from 1 on: 4, from 4 on: 2           before, since PR #8194

So the file says in a comment for which it was written, and `parse` believes that line.

Of a dynamic tree max_draft_len is the levels, and max_total_draft_tokens its nodes without the root.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace

from treeopt.errors import InvalidInput, quoted
from treeopt.export import chains, dynamic
from treeopt.export.engine import Lengths, Request, Settings, Written
from treeopt.files.bounds import parse_yaml
from treeopt.trees.dynamic import DynamicTree

FILE = "llm_api_options.yml"
TYPES = {"eagle3": "Eagle3", "mtp": "MTP", "draft-model": "Draft_Target", "ngram": "NGram"}
OWN_MODEL = ("eagle3", "draft-model")
UPPER, LOWER = "upper-bound", "lower-bound"


def write(request: Request) -> Written:
    """The options of ``trtllm-serve``; InvalidInput where the first range has not the longest chain."""
    meaning = meaning_of(request.version)
    drafter = chains.drafter_of(request, TYPES, "TensorRT-LLM")
    lengths = chains.merged(request.lengths)
    longest = max(length for _, _, length in lengths)
    if longest == 0:
        return chains.plain("trtllm-serve MODEL")
    if lengths[0][2] != longest:
        raise InvalidInput(
            "TensorRT-LLM needs max_draft_len at the smallest key of its draft_len_schedule, so no range may "
            f"have a longer chain than the first, but the schedule has {chains.said(lengths)}: export one length "
            "with --batch-size."
        )
    lines = ["speculative_config:", f"  decoding_type: {TYPES[drafter]}", f"  max_draft_len: {longest}"]
    if drafter == "mtp" and meaning == LOWER:  # from which older releases take max_draft_len
        lines.append(f"  num_nextn_predict_layers: {longest}")
    if drafter in OWN_MODEL:
        lines.append("  speculative_model: DRAFTER")
    if drafter == "ngram":
        lines.append(f"  max_matching_ngram_size: {chains.LOOKED_UP}")
    notes: list[str] = []
    if request.rule != "greedy":
        if meaning == LOWER:
            raise InvalidInput(
                f"Releases whose draft_len_schedule has {LOWER} keys have no use_rejection_sampling: leave --engine-version "
                "out, or plan for greedy decoding."
            )
        lines.append(f"  use_rejection_sampling: {'true' if request.rule == 'reject' else 'false'}")
        notes.append("use_rejection_sampling is a setting of releases since PR #12588 of May 2026.")
    if len(lengths) > 1:
        schedule = upper_bounds(lengths) if meaning == UPPER else {begin: k for begin, _, k in lengths}
        pairs = ", ".join(f"{key}: {length}" for key, length in schedule.items())
        lines = [f"# draft_len_schedule: {meaning}", *lines, f"  draft_len_schedule: {{{pairs}}}"]
        notes += _notes(lengths, meaning, drafter)
    option = "--config" if meaning == UPPER else "--extra_llm_api_options"
    command = f"trtllm-serve MODEL {option} {FILE}"
    return chains.launch(command, notes, {FILE: "\n".join(lines) + "\n"})


NUMBERS = ("max_draft_len", "dynamic_tree_max_topK", "max_total_draft_tokens")
TREE_NOTES = (
    "TensorRT-LLM builds no dynamic trees for targets with sliding windows or MLA (gpt-oss, DeepSeek).",
    "It makes room for a tree of every sequence of its --max_batch_size.",
)


def write_tree(request: Request) -> Written:
    """The options of ``trtllm-serve`` for a dynamic tree; a chain is written as one."""
    chains.drafter_of(request, ("eagle3",), "TensorRT-LLM's dynamic trees")
    tree = dynamic.only_setting(request, "TensorRT-LLM")
    if tree is None:
        return chains.plain("trtllm-serve MODEL", "tree")
    if tree.topk == 1:
        return write(replace(request, lengths=((1, None, tree.levels),)))
    lines = [
        "speculative_config:",
        f"  decoding_type: {TYPES['eagle3']}",
        f"  max_draft_len: {tree.levels}",
        f"  max_total_draft_tokens: {tree.rows - 1}",
        "  use_dynamic_tree: true",
        f"  dynamic_tree_max_topK: {tree.topk}",
        "  speculative_model: DRAFTER",
    ]
    if request.rule != "greedy":
        lines.append("  use_rejection_sampling: false")
    return chains.launch(f"trtllm-serve MODEL --config {FILE}", TREE_NOTES, {FILE: "\n".join(lines) + "\n"})


def parse_tree(files: Mapping[str, str]) -> Settings:
    """The dynamic tree as TensorRT-LLM's config checks it; InvalidInput where it raises."""
    try:
        options = parse_yaml(files.get(FILE, "{}"))
    except ValueError as error:
        raise InvalidInput(f"{FILE} must be YAML: {error}") from None
    if not isinstance(options, dict) or not isinstance(config := options.get("speculative_config", {}), dict):
        raise InvalidInput(f"{FILE} must have options by name.")
    if not config:
        return dynamic.NO_SPECULATION
    needed = (True, bool(config.get("use_dynamic_tree")), False)
    for name, must in zip(NUMBERS, needed, strict=True):
        value = config.get(name)
        if (must or value is not None) and (type(value) is not int or value < 1):
            raise InvalidInput(f"{name} must be a whole number of at least 1, but is {quoted(value)}.")
    levels, topk, nodes = config[NUMBERS[0]], config.get(NUMBERS[1]), config.get(NUMBERS[2])
    if topk is None:
        return ((1, None, DynamicTree(levels, 1, levels + 1)),)
    nodes = nodes or topk * levels
    if not levels <= nodes <= topk * levels:
        raise InvalidInput(
            f"max_total_draft_tokens must be from max_draft_len, {levels}, to dynamic_tree_max_topK x max_draft_len, "
            f"{topk * levels}, but is {nodes}."
        )
    return ((1, None, DynamicTree(levels, topk, nodes + 1)),)


def meaning_of(version: str | None) -> str:
    """Which meaning of the keys a release has; the newest without one.

    Which release switched is not known: pull request #10860 dates from after 1.2.0rc6.

    >>> meaning_of(None), meaning_of("lower-bound"), meaning_of("1.1"), meaning_of("1.3")
    ('upper-bound', 'lower-bound', 'lower-bound', 'upper-bound')
    """
    if version in (None, UPPER, LOWER):
        return version or UPPER
    release = re.match(r"v?(\d+)\.(\d+)", version or "")
    if release is None:
        raise InvalidInput(f"A TensorRT-LLM version must be {UPPER}, {LOWER} or as in 1.2, but is {version!r}.")
    if int(release[1]) < 1:
        raise InvalidInput(
            f"TensorRT-LLM has draft_len_schedule since PR #8194, but {version} is older: use a release from 1.2 on."
        )
    return LOWER if (int(release[1]), int(release[2])) <= (1, 2) else UPPER


def upper_bounds(lengths: Lengths) -> dict[int, int]:
    """Last batch size of a range to its length; a last range without speculation needs no key.

    >>> upper_bounds(((1, 4, 4), (5, 8, 2), (9, None, 0)))
    {4: 4, 8: 2}
    """
    return {end or chains.LAST: length for _, end, length in lengths if end is not None or length}


def parse(files: Mapping[str, str]) -> Lengths:
    """The chain lengths as TensorRT-LLM looks them up; InvalidInput for what it refuses."""
    text = files.get(FILE, "")
    most = re.search(r"^ +max_draft_len: *(\d+) *$", text, re.M)
    written = re.search(r"^ +draft_len_schedule: *(\{.*\}) *$", text, re.M)
    if most is None:
        return chains.NO_SPECULATION
    if written is None:
        return ((1, None, int(most[1])),)
    meaning = LOWER if f"# draft_len_schedule: {LOWER}" in text.splitlines() else UPPER
    try:
        keyed = json.loads(re.sub(r"(\d+) *:", r'"\1":', written[1]))
    except json.JSONDecodeError as error:
        raise InvalidInput(f"draft_len_schedule must map batch sizes to lengths: {error}.") from None
    schedule = {int(key): length for key, length in keyed.items()}
    check(schedule, int(most[1]), meaning)
    look_up = up_to if meaning == UPPER else chains.length_at
    return chains.ranges_of(lambda batch_size: look_up(schedule, batch_size))


def check(schedule: Mapping[int, int], most: int, meaning: str) -> None:
    """Raise InvalidInput where TensorRT-LLM's own validation raises."""
    if not schedule or min(schedule) < 1 or min(schedule.values()) < 0:
        raise InvalidInput(f"draft_len_schedule needs keys from 1 and lengths from 0 on, but is {schedule}.")
    if meaning == LOWER and 1 not in schedule:
        raise InvalidInput(f"draft_len_schedule must have batch size 1 in this release, but is {schedule}.")
    if schedule[min(schedule)] != most:
        raise InvalidInput(
            f"The smallest key of draft_len_schedule must have max_draft_len, {most}, but has "
            f"{schedule[min(schedule)]}."
        )
    if max(schedule.values()) > most:
        raise InvalidInput(f"draft_len_schedule must not exceed max_draft_len, {most}, but is {schedule}.")


def up_to(schedule: Mapping[int, int], batch_size: int) -> int:
    """The newer look-up: the first key not below the batch size; 0 above the last.

    >>> [up_to({4: 4, 8: 2, 32: 1}, batch_size) for batch_size in (1, 4, 5, 32, 33)]
    [4, 4, 2, 1, 0]
    """
    return schedule[min(key for key in schedule if key >= batch_size)] if batch_size <= max(schedule) else 0


def _notes(lengths: Lengths, meaning: str, drafter: str) -> list[str]:
    """What was written, how to get the other, and where the releases differ."""
    other = LOWER if meaning == UPPER else UPPER
    which = "up to" if meaning == UPPER else "from"
    older = "since PR #10860" if meaning == UPPER else "before PR #10860"
    notes = [
        f"A key of draft_len_schedule means {which} that batch size, as in TensorRT-LLM {older}; releases on the "
        f"other side of it silently read it otherwise: --engine-version {other}."
    ]
    if meaning == UPPER and lengths[-1][2]:
        notes.append(f"Its last key is {chains.LAST}: above it TensorRT-LLM does not speculate.")
    if meaning == UPPER and drafter != "ngram" and any(length == 0 for _, _, length in lengths):
        notes.append("Some releases silently draft one token where the schedule has 0, to keep the drafter warm.")
    if meaning == LOWER and drafter not in ("ngram", "draft-model"):
        notes.append("The first releases with draft_len_schedule heed it for ngram and draft models only.")
    return notes
