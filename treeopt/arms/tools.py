"""Arms from the results of benchmarking tools, each in the forms that the tool itself writes (`records_of`).

vllm bench serve, its sweeps, spec_decode.py    with speculation and without
SGLang's bench_serving, bench_speculative.py    with speculation and without
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field

from treeopt.arms.arm import OFF, Arm, Arms
from treeopt.arms.columns import words_of
from treeopt.arms.lexicon import DATASET, DRAFTED
from treeopt.engines.measured.benchmarks import POSITIONS, Record, parsed, records_of
from treeopt.engines.measured.files import load_file
from treeopt.engines.sglang import SpeculationTimed
from treeopt.errors import InvalidInput
from treeopt.files.bounds import limit_rows
from treeopt.files.fields import Amount, Count, NotNegative, Positive, Share, checked
from treeopt.files.storage import document, typed

Read = tuple[Arm | None, list[str]]  # of a record: its arm, and notes
SUFFIXES = (".json", ".jsonl", ".txt", ".log")  # of results in a folder
MOST_TITLE = 80  # characters
UNNAMED = "drafter"  # where neither the file nor its name says which
MANY = 0.02  # steps without a draft over those with one, above which they are counted
OTHERS = 1.1  # tokens of all drafts over those that were answered, above which other requests were counted too


def read_tool(content: Any, path: Path) -> Arms | None:
    """The arms in a result of a benchmarking tool; None where it is of none.

    content : as `load_file` gives it
    """
    return _results([(content, path)], {})


def read_sweep(folder: Path) -> Arms:
    """The arms in a folder of vllm bench sweep serve, or with results of a tool; an arm for each run."""
    files = sorted(file for file in folder.rglob("run=*.json") if re.fullmatch(r"run=\d+\.json", file.name))
    files = files or sorted(file for file in folder.rglob("*") if file.suffix in SUFFIXES)
    failed = list(map(str, sorted(folder.rglob("*failure.json"))))
    contents = ((load_file(file), file) for file in limit_rows(files, folder))
    results = _results(contents, {"this run failed.": failed} if failed else {})
    if results is None:
        raise InvalidInput(
            f"{folder} must have results of a benchmarking tool, as vllm bench sweep serve writes them (run=0.json of each "
            "setting), but has none."
        )
    return results


def _results(contents: Iterable[tuple[Any, Path]], notes: dict[str, list[str]]) -> Arms | None:
    """The arms in the contents of files; None where none is of a tool. A note on several runs is one.

    notes : the places of each
    """
    arms, meanings = list[Arm](), dict[str, str]()
    for content, path in contents:
        records = list(limit_rows(records_of(content), path))
        some_drafted = any(_drafted(record) for _, record in records)
        for number, (titles, record) in enumerate(records, 1):
            form = next((form for form in FORMS if set(form[0]) <= record.keys()), None)
            if form is None:
                continue
            where = f"{path}, run {number}"
            given = {name: value for name, value in record.items() if value is not None}
            # A run without drafts beside others with drafts is not what the file's name says.
            names = titles if some_drafted and not _drafted(record) else [*titles, path.stem]
            try:
                arm, its_notes = form[1](given, names, where)
            except InvalidInput as error:
                raise InvalidInput(f"{where}: {error}") from None
            arms.extend([] if arm is None else [typed(Arm, document(arm), where)])
            meanings.update({name: meaning for name, meaning in form[2].items() if name in given})
            for note in its_notes:
                notes.setdefault(note, []).append(where)
    if not meanings:
        return None
    placed = []
    for note, places in notes.items():
        others = f" and {len(places) - 1} more" if len(places) > 1 else ""
        placed.append(f"{places[0]}{others}: {note}")
    return Arms(arms=tuple(arms), meanings=meanings, notes=tuple(placed))


class Served(BaseModel):
    """A run of vllm bench serve, of spec_decode.py or of SGLang's bench_serving."""

    completed: Count = 0
    failed: Count = 0
    duration: Amount | None = None
    total_input_tokens: Count = 0
    total_output_tokens: Count = 0
    output_throughput: NotNegative = 0
    mean_tpot_ms: NotNegative = 0
    p99_tpot_ms: NotNegative = 0
    max_concurrency: Positive | None = None
    drafts: Count = Field(0, alias="spec_decode_num_drafts")
    drafted: Count = Field(0, alias="spec_decode_draft_tokens")
    accepted: Count = Field(0, alias="spec_decode_accepted_tokens")
    length: NotNegative = Field(0, validation_alias=AliasChoices("spec_decode_acceptance_length", "accept_length"))
    positions: Annotated[tuple[Share, ...], BeforeValidator(parsed)] = Field((), validation_alias=POSITIONS)

    @property
    def answered(self) -> int:
        """Tokens of decoding steps; the first of each answer is of its prompt's pass."""
        return self.total_output_tokens - self.completed

    @property
    def undrafted(self) -> int:
        """Steps without a draft; 0 where they are few, or the tokens are not known."""
        steps = self.answered - self.drafts - self.accepted
        return steps if steps > MANY * self.drafts else 0

    @property
    def tokens_per_step(self) -> float | None:
        if self.drafts:
            return 1 + self.accepted / (self.drafts + self.undrafted)
        return self.length or None

    @property
    def k(self) -> int | None:
        """Guesses per step, by the positions that are counted, or by drafts that are nearly all as long."""
        mean = self.drafted / self.drafts if self.drafts else 0.0
        if self.positions:
            return max(len(self.positions), round(mean))  # the last ones may be left out where nothing was accepted
        return round(mean) if abs(mean - round(mean)) < 0.02 * mean else None

    @property
    def remarks(self) -> list[str]:
        found = [f"{self.failed} of {self.failed + self.completed} requests failed."] if self.failed else []
        if self.drafts and self.undrafted:
            found.append(
                "many steps had no draft. Its tokens per step count them; the acceptance length of vLLM does not."
            )
        if 0 < OTHERS * self.answered < self.drafts + self.accepted:
            found.append("its drafts brought more tokens than were answered: its acceptance is of other requests too.")
        return found


def _drafted(record: Record) -> bool:
    return bool(record.get("spec_decode_num_drafts") or record.get("accept_length"))


def _of_served(record: Record, titles: Sequence[str], where: str) -> Read:
    title, axes = _title(titles)
    run = checked(Served, {"max_concurrency": axes.get("concurrency"), **record})
    if "completed" in record and not run.completed:
        return None, ["no request was answered; the run was left out."]
    drafter, k = _setting(record, run, title, axes.get("k"))
    about = {name: axes[name] for name in ("temperature", "context") if name in axes} | _about(record)
    for name, tokens in (("input_tokens", run.total_input_tokens), ("output_tokens", run.total_output_tokens)):
        if run.completed and tokens:
            about[name] = str(round(tokens / run.completed))
    remarks = run.remarks
    if "request_rate" in about:
        remarks.append(
            f"{about['request_rate']} requests a second were sent: a setting that keeps up is no faster than they are."
        )
    if drafter == UNNAMED:
        remarks.append("the drafter is not named. The file's name can say it, as eagle3-k4.json does.")
    dataset = DATASET.search(title)
    arm = Arm(
        model=str(record.get("model_id") or _server(record).get("model_path") or ""),
        dataset=str(record.get("dataset_name") or record.get("dataset") or (dataset[0] if dataset else "")),
        drafter=drafter,
        k=k,
        concurrency=run.max_concurrency or run.completed + run.failed or 1,
        about=about,
        tokens_per_s=run.output_throughput or None,
        tpot_ms=run.mean_tpot_ms or None,
        tpot_p99_ms=run.p99_tpot_ms or None,
        tokens_per_step=None if drafter == OFF else run.tokens_per_step,
        positions=run.positions,
        prompts=run.completed or None,
        seconds=run.duration,
        source=where,
    )
    return arm, remarks


METHODS = ("method", "drafter", "spec_method", "speculative_method", "speculative_algorithm")
LENGTHS = ("num_speculative_tokens", "num_spec_tokens", "spec_tokens", "k")
SCHEDULE = "num_speculative_tokens_per_batch_size"
TREE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")


def _title(titles: Sequence[str]) -> tuple[str, Mapping[str, str]]:
    """The first title that names a setting, and the axes that it sets; "off" in a long line, as of a log, names none.

    >>> _title(["=====", "EAGLE-3 (num_steps=8):", "off"])
    ('EAGLE-3 (num steps=8):', {'k': '8', 'drafter': 'EAGLE-3'})
    """
    for title in titles:
        words = re.sub("[\"']", "", title.replace("_", " "))
        axes = words_of(words).axes
        if "drafter" in axes or axes.get("k", "0") != "0" or ("k" in axes and len(words) <= MOST_TITLE):
            return words, axes
    return "", {}


def _setting(record: Record, run: Served, title: str, named: str | None) -> tuple[str, int | None]:
    """Drafter and length: by what was drafted, the engine's config or metadata, and the title.

    named : the length in the title
    """
    config = _speculation(record)
    match = DRAFTED.search(title)
    drafter = next((str(config[name]) for name in METHODS if name in config), match[0] if match else UNNAMED)
    policy = "by batch size" if SCHEDULE in config else named
    if policy and not policy.isdecimal():
        return f"{drafter} {policy}", None
    if all(isinstance(config.get(name), int) for name in TREE):
        return _tree(drafter, *(config[name] for name in TREE))
    lengths = (run.k, *(config.get(name) for name in LENGTHS), named)
    k = next((int(length) for length in map(str, lengths) if re.fullmatch(r"\d{1,4}", length, re.ASCII)), None)
    is_plain = words_of(drafter).axes.get("k") == "0" or not (config or named or _drafted(record))
    return (OFF, 0) if k == 0 or (k is None and is_plain) else (drafter, k)


def _tree(algorithm: str, steps: int, topk: int, rows: int) -> tuple[str, int]:
    """The setting of SGLang's three flags; each shape of a tree is a drafter, whose length is its depth."""
    if topk > 1:
        return f"{algorithm} tree (topk {topk}, {rows} tokens)", steps
    return algorithm, min(steps, max(rows, 1) - 1)


def _server(record: Record) -> Record:
    info = record.get("server_info")
    return info if isinstance(info, dict) else {}


def _speculation(record: Record) -> dict[str, Any]:
    """How a record says that it drafts: in vLLM's config, in metadata, or in what SGLang's server says of itself."""
    found: dict[str, Any] = {}
    for name, value in {**_server(record), **record}.items():
        key, _, part = name.replace("-", "_").partition(".")
        if key == "speculative_config":
            config = {part: value} if part else parsed(value)
            found |= config if isinstance(config, dict) else {}
        elif key in (*METHODS, *LENGTHS, *TREE):
            found[key] = value
    return {name: value for name, value in found.items() if value is not None}


SAID = {  # elsewhere, or no condition
    "date", "endpoint_type", "backend", "label", "tag", "model_id", "tokenizer_id", "request_rate", "dataset_name", "dataset",
    "_benchmark_name", "max_concurrency", "num_prompts", "speculative_config", *METHODS, *LENGTHS,
}  # fmt: skip


def _about(record: Record) -> dict[str, str]:
    """Conditions of a run: metadata, what a sweep changed, the rate of requests, engine and version."""
    names = list(record)
    swept = names[names.index("run_number") + 1 :] if "run_number" in names else []  # in a CSV file figures, too
    about = {}
    for name, value in record.items():
        key = name.replace("-", "_").removeprefix("speculative_config.")
        is_condition = isinstance(value, str) or (name in swept and isinstance(value, int | float))
        if is_condition and key not in SAID and not key.startswith("spec_decode_"):
            about[key] = str(value)[:80]
    if str(rate := record.get("request_rate", "inf")) != "inf":
        about["request_rate"] = str(rate)
    if isinstance(backend := record.get("backend"), str):
        about["engine"] = "vllm" if backend.startswith("openai") else backend.partition("-")[0]
    if version := _server(record).get("version"):
        about["version"] = str(version)
    return about


def _of_steps(record: Record, _titles: Sequence[str], where: str) -> Read:
    run = checked(SpeculationTimed, record)
    drafter, k = _tree("EAGLE", run.steps, run.topk, run.num_draft_tokens) if run.steps else (OFF, 0)
    about = {"engine": "sglang"}
    if run.completion_tokens:
        about["output_tokens"] = str(round(run.completion_tokens))
    length = None if drafter == OFF else run.acc_length
    arm = Arm(drafter=drafter, k=k, concurrency=run.batch_size, about=about, unit="request", source=where)
    return replace(arm, tokens_per_s=run.speed or (run.acc_length or 1) / run.step_time, tokens_per_step=length), []


ALL = "tokens per second of all requests together"
SERVED = {
    "output_throughput": ALL,
    "mean_tpot_ms": "mean milliseconds per token of a request, its first left out",
    "p99_tpot_ms": "their 99th percentile",
    "spec_decode_num_drafts": "with the accepted tokens: tokens per step, with the bonus token",
    "accept_length": "tokens per step, with the bonus token; the mean since the server's start",
    POSITIONS: "share of the drafts whose guess was accepted with all before it",
}
FORMS: tuple[tuple[tuple[str, ...], Callable[[Record, Sequence[str], str], Read], dict[str, str]], ...] = (
    (("output_throughput", "duration"), _of_served, SERVED),
    (("spec_decode_num_drafts",), _of_served, SERVED),
    (("step_time", "num_draft_tokens", "steps"), _of_steps, {"speed": "tokens per second of one request while it decodes",
                                                             "acc_length": "tokens per step, with the bonus token"}),
)  # fmt: skip
