"""Requests of a log: what was asked and answered becomes token ids, requests.npz, without a model or torch.

It is all that drafters need which only copy text. Requests stand in the order in which they were asked, where times say it.
Those of one conversation are known by a column that names it, or else by how they begin:
messages  a request's first messages are those of an earlier one, with its answer or another one behind them
texts     the first blocks of 16 tokens are those of an earlier request and its answer
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import InvalidInput
from treeopt.files.notes import note
from treeopt.files.places import located
from treeopt.files.storage import sha256_of
from treeopt.records.options import Prompts
from treeopt.records.origins import Origin, Provenance, check_same_origin
from treeopt.records.requestlog import Request, RequestLog
from treeopt.records.rundir import RunDirectory
from treeopt.report.terminal import progress
from treeopt.report.wording import count
from treeopt.runtime.prompts.encoder import FILES, Encoder, encode_request
from treeopt.runtime.prompts.messages import Message, read_group
from treeopt.runtime.prompts.requests import LoggedRequest, requests_in
from treeopt.runtime.prompts.rows import Record, read_rows
from treeopt.runtime.prompts.sets import check_groups

HEEDED = ("column", "group_by", "responses", "chat_template")
BLOCK = 16  # tokens
MOST_OF_ROW = 2**24  # tokens of the requests in one row
MOST_TOKENS = 5 * 10**8  # of what is read again of a file of arrays

# Hashes of how a request begins, and of how later ones of its conversation may begin.
Chain = tuple[list[int], list[int]]

# What is said where something was counted: its noun and the sentence.
NOTES = {
    "skipped": ("row", "{} of {rows:,} left out, the first at line {first}."),
    "late": ("request", "{} stood behind later ones in the file: the times say the order."),
    "texts": ("answer", "{} of text tokenised again: tokens may end at other places than the model's did."),
    "unwritten_calls": ("answer", "{} without the calls of tools, which the chat template does not write."),
    "reasoning": ("answer", "{} with reasoning, which was generated too: it stands before the content, without marks around it."),
    "shorter": ("answer", "{} of far fewer tokens than usage counts: some of what was generated, such as reasoning, is not in the log, or it is "
                "another tokenizer."),
    "otherwise": ("answer", "{} tokenised alone: the chat template does not write the answer where it begins one."),
}  # fmt: skip


class TokenisedRequest(NamedTuple):
    """A request as tokens, and what tells its place among the others; ``begin_s`` is NaN where the log has no time."""

    tokens: Request
    group: str
    begin_s: float
    chain: Chain


def read_requests(
    run: RunDirectory, log: str | Path, tokenizer: str | Path | None, columns: Prompts, *, overwrite: bool = False
) -> RequestLog:
    """The requests of a log, kept as those of the run.

    tokenizer : folder with the model's tokenizer, for logs that have texts
    columns   : `HEEDED` of them: where prompts, answers and groups stand, and whether a chat template writes messages
    overwrite : replace another record of the run, which is kept otherwise
    """
    file, folder = Path(located(str(log))), Path(located(str(tokenizer))) if tokenizer else None
    if not file.is_file():
        raise InvalidInput(f"A log must be a file of requests and their answers, but {file} is none.")
    options = {name: getattr(columns, name) for name in HEEDED}
    files = [folder / name for name in FILES if (folder / name).is_file()] if folder else []
    made = {
        "source": {"log": str(file), "tokenizer": str(folder) if folder else None, **options},
        "log_sha256": sha256_of(file),
        "tokenizer": {part.name: sha256_of(part) for part in files} or None,
    }
    if not overwrite:
        run.check_free("a log", [file for file in run.accuracies() if file != run.requests])
    if run.requests.exists() and not overwrite:
        meta = run.read_requests().meta
        there = Origin(settings={key: meta.get(key) for key in made})
        check_same_origin(there, Origin(settings=made), f"{run.requests} (there) and the log (here)", run.remedy)
    encoder = Encoder.of_folder(folder, chat_template=columns.chat_template is not False) if folder else None
    requests = requests_of(file, encoder, columns)
    origin = replace(Provenance.here(), dataset=file.name, dataset_fingerprint=str(made["log_sha256"]))
    requests.meta.update(made, provenance=origin.record)
    with run.writing():
        run.replace_requests(requests)
    note(*requests.meta["notes"])
    return requests


def requests_of(file: Path, encoder: Encoder | None, columns: Prompts) -> RequestLog:
    """The requests of a log's rows; rows that give none are named in meta["skipped"]. InvalidInput where no row does.

    columns : column and responses say where prompt and answer stand; without, under a name that is known. group_by is a column
              whose values name the groups
    """
    group_by, rows, doubts = columns.group_by, read_rows(str(file)), Counter[str]()
    answered, groups, tokens = list[TokenisedRequest](), dict[str, int](), 0

    def read(row: Record) -> list[TokenisedRequest]:
        group, found, size = read_group(row, group_by), list[TokenisedRequest](), 0
        for request in requests_in(row, columns.column, columns.responses):
            prompt, answer = (array("i", ids) for ids in encode_request(request, encoder, doubts))
            limit = request.limit and max(request.limit, len(answer))  # tokenised again, an answer may be longer
            chain = chain_of(request, prompt, answer)
            found.append(TokenisedRequest(Request(prompt, answer, limit), group, request.begin_s, chain))
            size += len(prompt) + len(answer)
            if size > MOST_OF_ROW:
                raise ValueError(f"its answers, each with the prompt, have more than {MOST_OF_ROW:,} tokens")
        return found

    with progress("Reading", None):
        for _, found in rows.each(read):
            for request in found:
                answered.append(request)
                groups.setdefault(request.group, len(groups))
                tokens += len(request.tokens.prompt) + len(request.tokens.answer)
            check_groups(groups, group_by)
            if tokens > MOST_TOKENS:
                raise InvalidInput(f"A log may have {MOST_TOKENS:,} tokens, but has more: keep a part of it.")
    rows.check_columns({"`group_by`": group_by})
    if not answered:
        raise InvalidInput(
            f"A log must hold at least one answered request, but none of the {count(rows.n_skipped, 'row')} in "
            f"{rows.name} is one ({rows.reasons('line')})."
        )
    log = in_order(answered, groups)
    counted = {"rows": rows.n_read, "skipped": rows.n_skipped}
    log.meta.update(skipped=[vars(row) for row in rows.skipped], counted=counted, retokenised=dict(doubts))
    log.meta["notes"] = notes(log.meta)
    return log


def in_order(answered: Sequence[TokenisedRequest], groups: Mapping[str, int]) -> RequestLog:
    """The record of some requests, in the order in which they were asked; groups have numbers."""
    begins = np.array([request.begin_s for request in answered])
    is_timed = bool(np.isfinite(begins).all())
    order = np.argsort(begins, kind="stable") if is_timed else np.arange(len(answered))
    late = int((np.maximum.accumulate(order) > order).sum())
    asked = [answered[r] for r in order.tolist()]
    return replace(
        RequestLog.of(request.tokens for request in asked),
        group=np.array([groups[request.group] for request in asked]),
        cluster=conversations_of([request.chain for request in asked]),
        meta={"group_names": list(groups), "order": "begin_s" if is_timed else "file", "late": late},
    )


def notes(meta: Mapping[str, Any]) -> list[str]:
    """Sentences on what was left out of a log, and what its tokens leave in doubt."""
    counts = Counter({**meta["counted"], **meta["retokenised"], "late": meta["late"]})
    first = next((f"{row['row']}: {row['reason']}" for row in meta["skipped"]), "")
    return [
        sentence.format(count(counts[name], noun), first=first, rows=counts["rows"])
        for name, (noun, sentence) in NOTES.items()
        if counts[name]
    ]


def conversations_of(chains: Sequence[Chain]) -> NDArray[np.int32]:
    """(R,) the number of each request's conversation, of requests in order."""
    by_key, numbers, new = dict[int, int](), list[int](), 0
    for beginnings, keys in chains:
        number = next((by_key[beginning] for beginning in reversed(beginnings) if beginning in by_key), new)
        numbers.append(number)
        new += number == new
        by_key.update(dict.fromkeys(keys, number))
    return np.array(numbers, np.int32)


def chain_of(request: LoggedRequest, prompt: Sequence[int], answer: Sequence[int]) -> Chain:
    """Hashes of how a request begins, and of how later ones of its conversation do: as it was asked, and with its answer."""
    if request.conversation is not None:
        name = [hash((request.conversation,))]
        return name, name
    if request.messages and not request.text:
        spoken = map(_identity, (*request.messages, *([request.answer] if request.answer else [])))
        chain = list(accumulate(spoken, lambda before, message: hash((before, message)), initial=0))
        asked = len(request.messages)
        return chain[1:asked], [chain[asked], chain[-1]]
    whole = [*prompt, *answer]
    blocks = (tuple(whole[at : at + BLOCK]) for at in range(0, len(whole) - BLOCK + 1, BLOCK))
    chain = list(accumulate(blocks, lambda before, block: hash((before, block)), initial=0))
    is_known = BLOCK * (len(chain) - 1) > len(prompt)  # a block has some of the answer
    return chain[1 : len(prompt) // BLOCK + 1], chain[-1:] if is_known else []


def _identity(message: Message) -> tuple[str, str, str]:
    calls = message.get("tool_calls")
    return message["role"], message["content"].strip(), json.dumps(calls, sort_keys=True, default=str) if calls else ""
