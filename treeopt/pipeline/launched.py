"""Bench of a plan by servers that the user's own command starts: a launch for each contender, several times in turn.

setting  a contender: by batch size the options that it adds to the command, and what it drafts, None where the server decides
visit    what one launch answered at one batch size, and what the server counted meanwhile (`treeopt.serving.visit`)
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treeopt import demo
from treeopt.engines.base import About
from treeopt.engines.plans import Export, prepare, write_served
from treeopt.errors import InvalidInput, Unsupported
from treeopt.files.fields import checked
from treeopt.files.journal import Journal
from treeopt.files.shell import split_template
from treeopt.files.writing import discard
from treeopt.pipeline.bench import evenly, usual_prompts
from treeopt.pipeline.entrants import plain_and_chosen
from treeopt.pipeline.logged import groups_of, some_requests, tried_drafts
from treeopt.pipeline.session import resolve
from treeopt.planning.table import Candidate
from treeopt.records.benchmark import FEWEST_LAUNCHES, Benchmark
from treeopt.records.contender import Answer, Block, Contender, Predicted
from treeopt.records.exchange import ExportOptions
from treeopt.records.inputs import inputs_of, stale_plan
from treeopt.records.options import BenchOptions, Prompts, Server, Source
from treeopt.records.origins import Provenance, Runtime
from treeopt.records.plan import Plan, PlanEntry, Ranges, for_all
from treeopt.records.rules import rule_of
from treeopt.records.rundir import LAUNCHED, RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.report.terminal import note, progress
from treeopt.runtime.prompts.chat import BLANK_LINE, dialogue
from treeopt.serving.client import Prompt
from treeopt.serving.launch import Launcher
from treeopt.serving.visit import Visit, visited
from treeopt.text.rules import MANY
from treeopt.trees.draft import Draft
from treeopt.trees.tree import Tree

if TYPE_CHECKING:
    from treeopt.runtime.prompts.sets import Conversation

SERVERS = ("vllm", "llama-cpp")  # that count drafts by position
IN_A_ROW = 4  # requests of a conversation: a server keeps what one leaves behind for the next
HEEDED = ("drafter", "prompts", "column", "group_by", "split", "chat_template", "in_order", "seed")
DRAFTER = re.compile(r"\b(?:DRAFTER|HEADS)(?:\.gguf)?\b")

Setting = dict[int, tuple[tuple[str, ...], Draft | None]]


def bench_plan(run: RunDirectory, source: Source, options: BenchOptions, server: Server) -> Benchmark:
    """Answer held-out prompts by servers without speculation, with the plan's options and with the present ones.

    A benchmark of every batch size of the plan, or of the one that is asked for; each is kept, and the first is returned.
    """
    check_heeded({**source.given, "trees": options.trees, "time_limit_s": server.time_limit_s})
    launcher, plan = Launcher.parse(str(server.launch), server.within_s), run.read_plan()
    batch_size, engine = options.batch_size, _engine_of(plan, options.engine)
    export = prepare(plan, engine, ExportOptions(batch_size=batch_size))
    note(*stale_plan(run, plan), *export.notes)
    entries = [entry for entry in export.plan.entries if batch_size in (None, entry.batch_size)]
    most, loads = _loads(run, plan, entries, options, replace(source, drafter=None))
    settings = _settings(export, entries, loads, source.drafter, server.present)
    folder = run.partial(f"bench-{LAUNCHED}")
    visits = _visits(run, launcher, folder, settings, loads, options.rounds or FEWEST_LAUNCHES)
    results = []
    for entry in entries:
        size, runtime = entry.batch_size, Runtime(name=engine, command=server.launch)
        at = [visit for visit in visits if visit.batch_size == size]
        found = Benchmark(
            contenders=tuple(
                _contender(name, setting[size][1], at, loads[size], entry)
                for name, setting in settings.items()
                if size in setting
            ),
            prompts="held out",
            inputs=inputs_of(run.plan, *([run.requests] if run.requests.exists() else [])),
            max_new_tokens=most,
            provenance=replace(Provenance.here(), acceptance={"rule": "greedy"}, engine=runtime),
        )
        run.replace_bench(found, plan, size, LAUNCHED)
        results.append(found)
    discard(folder)
    return results[0]


def check_heeded(options: Mapping[str, Any], names: Collection[str] = HEEDED) -> None:
    """Raise InvalidInput where an option is given that a launched server does not heed."""
    if strange := sorted(name for name, value in options.items() if value and name not in names):
        raise InvalidInput(
            f"`{strange[0]}` does not go with `launch`, whose command says what is served: leave it out."
        )


def _engine_of(plan: Plan, asked: str | None) -> str:
    """The engine that is asked for, or that the plan is for; Unsupported or InvalidInput where its servers cannot be asked."""
    if rule_of(plan.acceptance) != "greedy":
        raise Unsupported("`launch` asks servers for greedy answers, but the plan is for another rule of acceptance.")
    planned = plan.constraint.engine if plan.constraint else None
    name = asked or (planned.name if planned else "")
    if name not in SERVERS:
        raise InvalidInput(f"`engine` must say whose server `launch` starts, {' or '.join(SERVERS)}, but got {name!r}.")
    return name


@dataclass(frozen=True)
class Load:
    """What is asked at one batch size.

    limits : most tokens of each answer · names : conversation and group of each · tried : what replay says of settings, in order
    """

    prompts: Sequence[Any]
    limits: Sequence[int]
    names: Sequence[tuple[str, str]]
    tried: Mapping[str, Candidate] = field(default_factory=dict)


def _loads(
    run: RunDirectory, plan: Plan, entries: Sequence[PlanEntry], options: BenchOptions, source: Source
) -> tuple[int, dict[int, Load]]:
    """The longest answer, and what is asked at every batch size: held-out prompts, or requests of the run's log."""
    loads, most = dict[int, Load](), options.max_new_tokens
    sizes = {entry.batch_size: options.num_prompts or usual_prompts(entry.batch_size) for entry in entries}
    if not run.requests.exists():
        source, trace = resolve(run, source), run.read_trace() if run.trace.exists() else None
        most = most or (trace.meta.get("max_new_tokens", 128) if trace else 128)
        left = held_out(source, trace)
        for size, wanted in sizes.items():
            chosen = evenly(left, wanted)
            names = [(f"row {one.row}", one.group) for one in chosen]
            loads[size] = Load(asked_of(chosen, source), [most] * len(chosen), names)
        return most, loads
    whole = run.read_requests()
    most = most or int(max(some.max() for some in (whole.answer_tokens, whole.limit) if some is not None))
    for entry in entries:
        log = some_requests(whole, sizes[entry.batch_size], most, MANY, in_a_row=IN_A_ROW)
        names = [(f"conversation {n}", group) for n, group in zip(log.clusters, groups_of(log), strict=True)]
        prompts, limits = zip(*((one.prompt, one.limit or most) for one in log.requests()), strict=True)
        loads[entry.batch_size] = Load(list(prompts), list(limits), names, tried_drafts(plan, entry, log, "serial"))
    return most, loads


def held_out(source: Source, trace: RankTrace | None) -> list[Conversation]:
    """Conversations that the trace was not measured on, by their places in the order that calibrate takes them in.

    Which of them were too long is not known without the model: as many more are left out as were skipped.
    """
    found, name = conversations_of(source), source.prompts
    if trace is None or (trace.meta.get("source") or {}).get("prompts") != name:
        return found
    groups = trace.conversation_groups()
    unseen, left = Counter(groups or [""] * len({*trace.clusters.tolist()})), []
    for one in found:
        group = one.group if groups else ""
        unseen[group] -= 1
        left += [one] if unseen[group] < -len(trace.meta.get("skipped") or ()) else []
    if not left:
        raise InvalidInput(f"`prompts` must leave some for bench, but all of {name} may have been calibrated on.")
    return left


def _settings(
    export: Export, entries: Sequence[PlanEntry], loads: Mapping[int, Load], drafter: object, present: str | None
) -> dict[str, Setting]:
    """The contenders: plain, as planned, as now, and what else replay says something of."""
    settings: dict[str, Setting] = {"plain": {}, "chosen": {}, **({} if present is None else {"present": {}})}
    _, usual_about = next(iter(export.parts.values()))
    for entry in entries:
        size = entry.batch_size
        own = {"plain": Tree.chain(0), **{name: tried.draft for name, tried in loads[size].tried.items()}}
        own.pop("chosen", None)
        for name, draft in own.items():  # whatever the batch size, where so many sequences are decoded
            words = _words(export, for_all(draft), replace(usual_about, batch_size=size), drafter)
            settings.setdefault(name, {})[size] = words, draft
        # The same at every batch size where the engine takes a schedule.
        part = export.parts[size if size in export.parts else None]
        settings["chosen"][size] = _words(export, *part, drafter), entry.draft
        if present is not None:
            settings["present"][size] = split_template("present", present, ()), None
    return settings


def _words(export: Export, served: Ranges[Draft], about: About, drafter: object) -> tuple[str, ...]:
    """What a launch command has behind its model, with the drafter that was given."""
    words = shlex.split(write_served(export.method, served, about).command)
    words = words[1 + max(i for i, word in enumerate(words) if word.startswith("MODEL")) :]
    if drafter is None and (named := next(filter(None, map(DRAFTER.search, words)), None)):
        raise InvalidInput(f"`drafter` must say what the server is to load as {named[0]}: a path or a name.")
    said = {True: json.dumps(str(drafter))[1:-1], False: str(drafter)}  # within JSON or not
    return tuple(said[word.startswith("{")].join(DRAFTER.split(word)) for word in words)


def _visits(
    run: RunDirectory,
    launcher: Launcher,
    folder: Path,
    settings: Mapping[str, Setting],
    loads: Mapping[int, Load],
    launches: int,
) -> list[Visit]:
    """Every setting launched so many times, in turn and back again, through a journal."""
    asked = {size: (load.prompts, load.limits) for size, load in loads.items()}
    turn: dict[tuple[str, tuple[str, ...]], list[int]] = {}  # a launch serves all batch sizes of the same options
    for name, setting in settings.items():
        for size, (options, _) in setting.items():
            turn.setdefault((name, options), []).append(size)
    order = [(number, *one) for number in range(launches) for one in (list(turn), list(turn)[::-1])[number % 2]]
    key = {"launch": launcher.words, "environment": launcher.environment, "order": order}
    journal = Journal(folder, {**key, "asked": asked})
    done = journal.finished()
    with progress(f"Launching {len(turn)} servers {launches} times", len(order)) as advance:
        advance(done)
        for number, name, options in order[done:]:
            log = run.path / "launches" / f"{name.replace(' ', '-')}-{number + 1}.log"
            load = {size: asked[size] for size in turn[name, options]}
            visits = launcher.visit(options, log, partial(visited, launch=number, name=name, load=load))
            journal.append({"visits": [visit.model_dump() for visit in visits]})
            advance(1)
    return [checked(Visit, visit) for document in journal.documents() for visit in document["visits"]]


def conversations_of(source: Source) -> list[Conversation]:
    """The conversations of a file or a data set, without tokens, in the order that calibrate takes them in."""
    from treeopt.runtime.prompts.order import order_of, spread
    from treeopt.runtime.prompts.sets import read_conversations

    if source.prompts in (None, demo.NAME):
        raise InvalidInput("A server is asked in text, so `prompts` must be a file or a data set, but is none.")
    order = order_of(source)
    columns = {"column": source.column, "group_by": source.group_by, "split": source.split}
    found = read_conversations(str(source.prompts), **columns, order=order)[1].things()
    return found if order.seed is None else [found[i] for i in spread([one.group for one in found], order.seed)]


def asked_of(conversations: Iterable[Conversation], prompts: Prompts) -> list[Prompt]:
    """The first prompt of each as messages, or as a text where the server is to put no template around it."""
    firsts = [dialogue(conversation.messages, ()) for conversation in conversations]
    if prompts.chat_template:
        return [[{"role": role, "content": text} for role, text in first] for first in firsts]
    return [BLANK_LINE.join(text for _, text in first) for first in firsts]


def _contender(name: str, draft: Draft | None, at: Sequence[Visit], load: Load, entry: PlanEntry) -> Contender:
    """What the launches of a setting come to at the batch size of an entry; texts are compared with plain's first launch.

    Steps are of the first launch, spread over its answers.
    """
    plain, known = next(visit for visit in at if visit.name == "plain"), plain_and_chosen(entry)
    visits = [visit for visit in at if visit.name == name]
    predicted = {key: entrant.predicted for key, entrant in known.items()}
    predicted |= {key: tried.rates.estimate for key, tried in load.tried.items()}
    first = visits[0]
    ends = np.cumsum([answer.step_tokens for answer in first.answers]) * first.steps / max(first.emitted, 1)
    sequences = [
        Answer(
            id=prompt,
            group=group,
            tokens=max(answer.num_tokens, 1),
            steps=steps,
            identical=all(visit.answers[i].text == plain.answers[i].text for visit in visits),
        )
        for i, ((prompt, group), answer, steps) in enumerate(
            zip(load.names, first.answers, np.diff(np.rint(ends), prepend=0).astype(int).tolist(), strict=True)
        )
    ]
    blocks = [
        Block(
            round=visit.launch,
            prompts=[i],
            tokens=answer.step_tokens,
            steps=round(answer.step_tokens / visit.tokens_per_step),
            decode_s=answer.steps_s / visit.batch_size,
            group=load.names[i][1],
        )
        for visit in visits
        for i, answer in visit.timed.items()
    ]
    return Contender(
        name=name,
        batch_size=entry.batch_size,
        draft=Tree.chain(len(first.reached)) if draft is None else draft,
        sequences=sequences,
        blocks=blocks,
        accepted=[a - b for a, b in pairwise([first.drafts, *first.reached, 0])] if first.drafts else [],
        spread=True,
        predicted=Predicted.of(predicted.get(name)),
    )
