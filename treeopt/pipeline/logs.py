"""Calibrate from logs: what was asked and answered becomes token ids, requests.npz, without a model or torch.

It is all that drafters need which only copy text. Requests stand in the order in which they were asked, where times say it.
Those of one conversation are known by a column that names it, or else by how they begin:
messages  a request's first messages are those of an earlier one, with its answer or another one behind them
texts     the first blocks of 16 tokens are those of an earlier request and its answer
"""

from __future__ import annotations

import json
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
from treeopt.growth.contexts import context_name
from treeopt.records.options import Prompts
from treeopt.records.origins import Origin, Provenance, check_same_origin
from treeopt.records.requestlog import RequestLog
from treeopt.records.rundir import RunDirectory
from treeopt.report.terminal import progress
from treeopt.report.wording import count
from treeopt.runtime.prompts.asked import read_group
from treeopt.runtime.prompts.encoded import Encoder, Tokens
from treeopt.runtime.prompts.files import read_rows
from treeopt.runtime.prompts.logged import LoggedRequest, Message, read_logged
from treeopt.runtime.prompts.sets import MOST_GROUPS
from treeopt.runtime.prompts.tokenizer import FILES, Tokenizer

HEEDED = ("column", "group_by", "responses", "chat_template")
BLOCK = 16  # tokens
CONTEXT = "context"  # what requests are grouped by that is no column
MOST_TOKENS = 5 * 10**8  # of what is read again of a file of arrays

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


def calibrate_from_logs(
    run: RunDirectory, file: str | Path, tokenizer: str | Path | None, prompts: Prompts, *, overwrite: bool = False
) -> RequestLog:
    """The requests of a log, kept as those of the run.

    tokenizer : folder with the model's tokenizer.json, for logs that have texts
    prompts   : the columns of the log
    """
    file, folder = Path(located(str(file))), Path(located(str(tokenizer))) if tokenizer else None
    if not file.is_file():
        raise InvalidInput(f"A log must be a file of requests and their answers, but {file} is none.")
    options = {name: getattr(prompts, name) for name in HEEDED}
    files = [folder / name for name in FILES if (folder / name).is_file()] if folder else []
    made = {
        "source": {"log": str(file), "tokenizer": str(folder) if folder else None, **options},
        "log_sha256": sha256_of(file),
        "tokenizer": {one.name: sha256_of(one) for one in files} or None,
    }
    if not overwrite:
        run.check_free("a log", [file for file in run.accuracies() if file != run.requests])
    if run.requests.exists() and not overwrite:
        meta = run.read_requests().meta
        there = Origin(settings={key: meta.get(key) for key in made})
        check_same_origin(there, Origin(settings=made), f"{run.requests} (there) and the log (here)", run.remedy)
    chat_template = options.pop("chat_template") is not False
    log = read_requests(file, Tokenizer(folder, chat_template=chat_template) if folder else None, **options)
    origin = replace(Provenance.here(), dataset=file.name, dataset_fingerprint=str(made["log_sha256"]))
    log.meta.update(made, provenance=origin.record)
    with run.writing():
        run.replace_requests(log)
    note(*log.meta["notes"])
    return log


def read_requests(
    file: Path,
    tokenizer: Tokenizer | None = None,
    *,
    column: str | None = None,
    responses: str | None = None,
    group_by: str | None = None,
) -> RequestLog:
    """The requests of a log's rows; rows that give none are named in meta["skipped"]. InvalidInput where no row does.

    column, responses : where prompt and answer stand; None: under a name that is known
    group_by          : column whose values name the groups; context, where there is none so called: the length of a request in
                        the middle of its answer, by powers of two
    """
    rows, encode, found, tokens = read_rows(str(file), option="log"), Encoder(tokenizer), list[Row](), 0
    groups = dict[str, int]()

    def read(row: Mapping[str, Any]) -> tuple[list[tuple[LoggedRequest, Tokens, Tokens]], list[str]]:
        made = [(one, *encode(one)) for one in read_logged(row, column, responses)]
        if group_by != CONTEXT or CONTEXT in row:
            return made, [read_group(row, group_by)] * len(made)
        return made, [context_name(len(prompt) + len(answer) // 2) for _, prompt, answer in made]

    with progress("Reading", None):
        for _, (made, names) in rows.each(read):
            if len(groups) > MOST_GROUPS:
                raise InvalidInput(f"`group_by` may have {MOST_GROUPS} different values, but {group_by} has more.")
            for (one, prompt, answer), name in zip(made, names, strict=True):
                limit = one.limit and max(one.limit, len(answer))  # tokenised again, an answer may be longer
                begun, keys = hashes(one, prompt, answer)
                tokens += len(prompt) + len(answer)
                ids = np.array([*prompt, *answer], np.int32)
                group = groups.setdefault(name, len(groups))
                found.append(Row(ids, len(prompt), group, limit, one.begin_s, begun, keys))
            if tokens > MOST_TOKENS:
                raise InvalidInput(f"A log may have {MOST_TOKENS:,} tokens, but has more: keep a part of it.")
    rows.check_columns({"`group_by`": None if group_by == CONTEXT else group_by})
    if not groups:
        raise InvalidInput(
            f"A log must hold at least one answered request, but none of the {count(rows.n_skipped, 'row')} in "
            f"{rows.name} is one ({rows.reasons('line')})."
        )
    log = log_of(found, list(groups))
    counted = {"rows": rows.n_read, "skipped": rows.n_skipped}
    log.meta.update(skipped=[vars(row) for row in rows.skipped], counted=counted, retokenised=dict(encode.counted))
    log.meta["notes"] = notes(log)
    return log


def notes(log: RequestLog) -> list[str]:
    """Sentences on what was left out of a log, and what its tokens leave in doubt."""
    n = Counter({**log.meta["counted"], **log.meta["retokenised"]})
    first = next(iter(log.meta["skipped"]), {"row": 0, "reason": ""})
    n["late"] = log.meta["late"]
    told = {"first": f"{first['row']}: {first['reason']}", "rows": n["rows"]}
    return [said.format(count(n[name], noun), **told) for name, (noun, said) in NOTES.items() if n[name]]


class Row(NamedTuple):
    """A request, its tokens with the prompt's first, as in `RequestLog`.

    begun, keys : hashes of how it begins, and two of how later requests of its conversation may begin
    """

    tokens: NDArray[np.int32]
    prompt_tokens: int
    group: int
    limit: int
    begin_s: float
    begun: list[int]
    keys: tuple[int, int]


def log_of(rows: Sequence[Row], group_names: Sequence[str]) -> RequestLog:
    """The record of some requests, in the order in which they were asked."""
    begins = np.array([row.begin_s for row in rows])
    is_timed = bool(np.isfinite(begins).all())
    order = np.argsort(begins, kind="stable") if is_timed else np.arange(len(rows))
    late = int((np.maximum.accumulate(order) > order).sum())
    meta = {"group_names": list(group_names), "order": "begin_s" if is_timed else "file", "late": late}
    asked = [rows[r] for r in order.tolist()]
    starts = np.cumsum([0, *(len(row.tokens) for row in asked)])
    tokens = np.concatenate([row.tokens for row in asked])
    columns = {name: np.array([getattr(row, name) for row in asked]) for name in ("prompt_tokens", "group", "limit")}
    return RequestLog(tokens, starts, **columns, cluster=conversations_of(asked), meta=meta)


def conversations_of(rows: Sequence[Row]) -> NDArray[np.int32]:
    """The number of each request's conversation."""
    known, found, new = dict[int, int](), list[int](), 0
    for row in rows:
        found.append(next((known[one] for one in reversed(row.begun) if one in known), new))
        new += found[-1] == new
        known.update((key, found[-1]) for key in row.keys if key)
    return np.array(found, np.int32)


def hashes(one: LoggedRequest, prompt: Tokens, answer: Tokens) -> tuple[list[int], tuple[int, int]]:
    """Hashes of how a request begins, and two of how later ones of its conversation do: as it was asked, and with its answer."""
    if one.conversation is not None:
        name = hash((one.conversation,))
        return [name], (name, 0)
    if one.messages and not one.text:
        said = map(_identity, (*one.messages, *([one.answer] if one.answer else [])))
        chain = list(accumulate(said, lambda before, message: hash((before, message)), initial=0))
        asked = len(one.messages)
        return chain[1:asked], (chain[asked], chain[-1])
    whole = [*prompt, *answer]
    blocks = (tuple(whole[at : at + BLOCK]) for at in range(0, len(whole) - BLOCK + 1, BLOCK))
    chain = list(accumulate(blocks, lambda before, block: hash((before, block)), initial=0))
    is_known = BLOCK * (len(chain) - 1) > len(prompt)  # a block has some of the answer
    return chain[1 : len(prompt) // BLOCK + 1], (chain[-1] if is_known else 0, 0)


def _identity(message: Message) -> tuple[str, str, str]:
    calls = message.get("tool_calls")
    return message["role"], message["content"].strip(), json.dumps(calls, sort_keys=True, default=str) if calls else ""
