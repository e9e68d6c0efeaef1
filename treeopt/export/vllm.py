"""vLLM: ``--speculative-config``, a chain length or one for each range of batch sizes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from treeopt.errors import InvalidInput
from treeopt.export import chains
from treeopt.export.engine import Lengths, Request, Written
from treeopt.files.shell import shell_word

FILE = "speculative_config.json"
SCHEDULE = "num_speculative_tokens_per_batch_size"
METHODS = {
    "eagle3": "eagle3",
    "eagle": "eagle",
    "mtp": "mtp",
    "draft-model": "draft_model",
    "ngram": "ngram",
    "dflash": "dflash",
    "dspark": "dspark",
}
IN_THE_MODEL = ("mtp", "ngram")  # need no model of their own
MEDUSA_UNTIL = "0.32.0"


def write_medusa(request: Request) -> Written:
    """One chain length for all batch sizes: vLLM's proposer asserts that it never changes."""
    chains.drafter_of(request, ("medusa",), "vLLM's Medusa proposer")
    length = chains.within_heads(chains.only_length(request, "vLLM with Medusa heads"), request, "vLLM")
    if length == 0:
        return chains.plain("vllm serve MODEL")
    config = {"method": "medusa", "model": "HEADS", "num_speculative_tokens": length}
    note = "vLLM reads the heads in its own layout: treeopt convert DRAFTER --to vllm --output HEADS"
    return _written(config, [note])


def write_chain(request: Request) -> Written:
    """One length, or a length for each range of batch sizes."""
    drafter = chains.drafter_of(request, METHODS, "vLLM")
    lengths = chains.merged(request.lengths)
    longest = max(length for _, _, length in lengths)
    if longest == 0:
        return chains.plain("vllm serve MODEL")
    config: dict[str, Any] = {"method": METHODS[drafter]}
    if drafter not in IN_THE_MODEL:
        config["model"] = "DRAFTER"
    if drafter == "ngram":
        config["prompt_lookup_max"], config["prompt_lookup_min"] = chains.LOOKED_UP, 1
    if request.rule == "reject":
        config["draft_sample_method"] = "probabilistic"
    config["num_speculative_tokens"] = longest
    notes = []
    if drafter == "mtp" and longest > 1:
        notes.append(
            f"vLLM does not start where the model has fewer MTP layers than {longest} and their number does not divide "
            f"{longest}."
        )
    if drafter == "draft-model":
        notes.append(
            "vLLM does not start where the vocabularies of MODEL and DRAFTER differ in size, unless the config has "
            '"use_heterogeneous_vocab": true, which goes with greedy drafts alone.'
        )
    if len(lengths) > 1:
        config[SCHEDULE] = [[begin, end or chains.LAST, length] for begin, end, length in lengths]
        notes.append(f"The last range ends at {chains.LAST}: above it vLLM carries its length forward.")
        notes.append(
            f"With --data-parallel-size above 1 vLLM drops the schedule and keeps {longest} at every batch size."
        )
        notes.append(
            "Schedules run with full CUDA graphs on model runner V2 only, the default of 0.33.0; releases from 0.25.0 on "
            "take VLLM_USE_V2_MODEL_RUNNER=1."
        )
    return _written(config, notes)


def write_suffix(request: Request) -> Written:
    """One chain length for all batch sizes: it runs on model runner V1, which drops a schedule of this method."""
    chains.drafter_of(request, ("suffix",), "vLLM's suffix decoding")
    length = chains.only_length(request, "vLLM with suffix decoding")
    if length == 0:
        return chains.plain("vllm serve MODEL")
    note = "Suffix decoding needs Arctic Inference: pip install arctic-inference==0.1.1"
    return _written({"method": "suffix", "num_speculative_tokens": length}, [note])


def parse(files: Mapping[str, str]) -> Lengths:
    """The chain lengths as vLLM looks them up; none without a ``--speculative-config``.

    Raises InvalidInput for a schedule that vLLM refuses, and where file and command differ.
    """
    config = _config(files)
    if config is None:
        return chains.NO_SPECULATION
    most = config.get("num_speculative_tokens")
    if type(most) is not int or most < 1:
        raise InvalidInput(f"vLLM needs num_speculative_tokens of at least 1, but got {most!r}.")
    if config.get(SCHEDULE) is None:
        return ((1, None, most),)
    # A gap and the tail carry the last length forward, and no length exceeds the most.
    lengths = {begin: min(most, length) for begin, _, length in checked(config[SCHEDULE])}
    return chains.ranges_of(lambda batch_size: chains.length_at(lengths, batch_size))


def checked(schedule: object) -> list[tuple[int, int, int]]:
    """The sorted schedule; InvalidInput where vLLM's own validation raises, naming its rule."""
    if not isinstance(schedule, list) or not schedule:
        raise InvalidInput(f"{SCHEDULE} must be a list of [from, to, length], but got {schedule!r}.")
    for item in schedule:
        if not isinstance(item, list) or len(item) != 3 or not all(type(number) is int for number in item):
            raise InvalidInput(f"{SCHEDULE} must have items [from, to, length], but has {item!r}.")
        if not 1 <= item[0] <= item[1] or item[2] < 0:
            raise InvalidInput(f"{SCHEDULE} needs 1 <= from <= to and a length of at least 0: {item!r}.")
    ranges = sorted((begin, end, length) for begin, end, length in schedule)
    if ranges[0][0] != 1:
        raise InvalidInput(f"{SCHEDULE} must begin at batch size 1, but begins at {ranges[0][0]}.")
    for (*_, end, _), (begin, _, _) in pairwise(ranges):
        if begin <= end:
            raise InvalidInput(f"{SCHEDULE} must not overlap, but two ranges have batch size {begin}.")
    return ranges


def _written(config: dict[str, Any], notes: Iterable[str]) -> Written:
    text = json.dumps(config)
    command = f"vllm serve MODEL --speculative-config {shell_word(text)}"
    return chains.launch(command, notes, {FILE: f"{text}\n"})


def _config(files: Mapping[str, str]) -> dict[str, Any] | None:
    """The speculative config of the file and of the command, which must agree; None without one."""
    texts = [text for text in (files.get(FILE), chains.flags(files).get("--speculative-config")) if text]
    try:
        configs = [json.loads(text) for text in texts]
    except json.JSONDecodeError as error:
        raise InvalidInput(f"A speculative config must be JSON: {error}.") from None
    if not all(isinstance(config, dict) and config == configs[0] for config in configs):
        raise InvalidInput(f"{FILE} and the command must have the same JSON object, but differ.")
    return configs[0] if configs else None
