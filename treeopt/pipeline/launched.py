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
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treeopt import demo
from treeopt.engines.base import About
from treeopt.engines.plans import Export, ExportOptions, prepare, write_served
from treeopt.errors import InvalidInput, Unsupported
from treeopt.files.fields import checked
from treeopt.files.journal import Journal
from treeopt.files.shell import split_template
from treeopt.files.writing import discard
from treeopt.pipeline.decoding import evenly, usual_prompts
from treeopt.pipeline.entrants import plain_and_chosen
from treeopt.pipeline.logged import groups_of, some_requests, tried_drafts
from treeopt.pipeline.session import resolve
from treeopt.planning.table import Candidate
from treeopt.records.benchmark import FEWEST_LAUNCHES, Benchmark
from treeopt.records.contender import Answer, Block, Contender, Predicted
from treeopt.records.inputs import inputs_of, stale_plan
from treeopt.records.origins import Provenance, Runtime
from treeopt.records.plan import PlanEntry, Ranges, for_all
from treeopt.records.requestlog import RequestLog
from treeopt.records.rules import rule_of
from treeopt.records.rundir import LAUNCHED, RunDirectory
from treeopt.report.terminal import note, progress
from treeopt.runtime.prompts.asked import first_turn
from treeopt.runtime.prompts.chat import BLANK_LINE
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

Setting = Mapping[int, tuple[tuple[str, ...], Draft | None]]


def bench_plan(run: RunDirectory, asked: Mapping[str, Any], options: Mapping[str, Any]) -> Benchmark:
    """Answer held-out prompts by servers without speculation, with the plan's options and with the present ones.

    A benchmark of every batch size of the plan, or of the one that is asked for; each is kept, and the first is returned.

    asked : parameters of `treeopt.bench` · options : of the drafter and the prompts
    """
    check_heeded({**options, "model": asked["model"], "trees": asked["trees"], "time_limit_s": asked["time_limit_s"]})
    contest, present = Contest.opened(run, asked, options), asked["present"]
    most, folder = asked["max_new_tokens"] or contest.max_new_tokens, run.partial(f"bench-{LAUNCHED}")
    load = contest.load(asked["num_prompts"], most)
    chosen = {e.batch_size: (contest.planned(e.batch_size), e.draft) for e in contest.entries}
    settings: dict[str, Setting] = {
        "plain": {size: contest.alone(size, Tree.chain(0)) for size in chosen},
        "chosen": chosen,
    }
    if present is not None:
        settings["present"] = dict.fromkeys(chosen, (split_template("present", present, ()), None))
    for who in dict.fromkeys(name for one in load.values() for name in one.tried if name != "chosen"):
        settings[who] = {n: contest.alone(n, one.tried[who].draft) for n, one in load.items() if who in one.tried}
    visits = contest.visits(folder, settings, load, asked["rounds"] or FEWEST_LAUNCHES)
    results = []
    for entry in contest.entries:
        at = [visit for visit in visits if visit.batch_size == entry.batch_size]
        runtime: Runtime = {"name": contest.engine, "command": asked["launch"]}
        found = Benchmark(
            contenders=tuple(
                _contender(name, one, at, load[entry.batch_size], entry)
                for name, one in settings.items()
                if entry.batch_size in one
            ),
            prompts="held out",
            inputs=inputs_of(run.plan, *run.accuracies()[-1:] if contest.log else ()),
            max_new_tokens=most,
            provenance=replace(Provenance.here(), acceptance={"rule": "greedy"}, engine=runtime),
        )
        run.replace_bench(found, run.read_plan(), entry.batch_size, LAUNCHED)
        note(*_about_texts(found))
        results.append(found)
    discard(folder)
    return results[0]


def check_heeded(options: Mapping[str, Any], names: Collection[str] = HEEDED) -> None:
    """Raise InvalidInput where an option is given that a launched server does not heed."""
    if strange := sorted(name for name, value in options.items() if value and name not in names):
        raise InvalidInput(
            f"`{strange[0]}` does not go with `launch`, whose command says what is served: leave it out."
        )


@dataclass(frozen=True)
class Load:
    """What is asked at one batch size.

    limits : most tokens of each answer · names : conversation and group of each · tried : what replay says of settings, in order
    """

    prompts: Sequence[Any]
    limits: Sequence[int]
    names: Sequence[tuple[str, str]]
    tried: Mapping[str, Candidate] = field(default_factory=dict)


@dataclass(frozen=True)
class Contest:
    """A plan as an engine is told of it, and launches of its servers; ``given`` are options of the drafter and the prompts."""

    run: RunDirectory
    launcher: Launcher
    engine: str
    export: Export
    entries: Sequence[PlanEntry]
    given: Mapping[str, Any]

    @classmethod
    def opened(cls, run: RunDirectory, asked: Mapping[str, Any], given: Mapping[str, Any]) -> Contest:
        """Raises InvalidInput or Unsupported, before anything is launched, for what cannot be served."""
        launcher, plan = Launcher.parse(asked["launch"], asked["within_s"]), run.read_plan()
        batch_size = asked["batch_size"]
        if rule_of(plan.acceptance) != "greedy":
            raise Unsupported(
                "`launch` asks servers for greedy answers, but the plan is for another rule of acceptance."
            )
        planned = plan.constraint.engine if plan.constraint else None
        if (name := asked["engine"] or (planned.name if planned else "")) not in SERVERS:
            raise InvalidInput(
                f"`engine` must say whose server `launch` starts, {' or '.join(SERVERS)}, but got {name!r}."
            )
        export = prepare(plan, name, ExportOptions(batch_size=batch_size))
        note(*stale_plan(run, plan), *export.notes)
        entries = [entry for entry in export.plan.entries if batch_size in (None, entry.batch_size)]
        return cls(run, launcher, name, export, entries, given)

    def planned(self, batch_size: int) -> tuple[str, ...]:
        """The options of the plan: the same at every batch size where the engine takes a schedule."""
        return self._words(*self.export.parts[batch_size if batch_size in self.export.parts else None])

    def alone(self, batch_size: int, draft: Draft) -> tuple[tuple[str, ...], Draft]:
        """The options for a chain, or copied text, whatever the batch size, where so many sequences are decoded."""
        _, about = next(iter(self.export.parts.values()))
        return self._words(for_all(draft), replace(about, batch_size=batch_size)), draft

    def _words(self, served: Ranges[Draft], about: About) -> tuple[str, ...]:
        """What a launch command has behind its model, with the drafter that was given."""
        words = shlex.split(write_served(self.export.method, served, about).command)
        words = words[1 + max(i for i, word in enumerate(words) if word.startswith("MODEL")) :]
        drafter = self.given.get("drafter")
        if drafter is None and (named := next(filter(None, map(DRAFTER.search, words)), None)):
            raise InvalidInput(f"`drafter` must say what the server is to load as {named[0]}: a path or a name.")
        said = {True: json.dumps(str(drafter))[1:-1], False: str(drafter)}  # within JSON or not
        return tuple(said[word.startswith("{")].join(DRAFTER.split(word)) for word in words)

    @cached_property
    def max_new_tokens(self) -> int:
        if self.log is not None:
            return int(max(some.max() for some in (self.log.answer_tokens, self.log.limit) if some is not None))
        return int(self.run.read_trace().meta.get("max_new_tokens", 128)) if self.run.trace.exists() else 128

    @cached_property
    def log(self) -> RequestLog | None:
        return self.run.read_requests() if self.run.requests.exists() else None

    @cached_property
    def source(self) -> dict[str, Any]:
        return resolve(self.run, {name: value for name, value in self.given.items() if name != "drafter"})

    @cached_property
    def held_out(self) -> list[Conversation]:
        """Conversations that the run was not calibrated with, by their places in the order that calibrate takes them in.

        Which of them were too long is not known without the model: as many more are left out as were skipped.
        """
        found, name = conversations_of(self.source), self.source["prompts"]
        trace = self.run.read_trace() if self.run.trace.exists() else None
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

    def load(self, num_prompts: int | None, most: int) -> dict[int, Load]:
        """What is asked at every batch size: held-out prompts, or requests of the log, with at most so many tokens of an answer."""
        found = {}
        for entry in self.entries:
            wanted = num_prompts or usual_prompts(entry.batch_size)
            if self.log is None:
                of = evenly(self.held_out, wanted)
                found[entry.batch_size] = Load(
                    asked_of(of, self.source), [most] * len(of), [(f"row {p.row}", p.group) for p in of]
                )
                continue
            log = some_requests(self.log, wanted, most, MANY, in_a_row=IN_A_ROW)
            names = [(f"conversation {n}", group) for n, group in zip(log.clusters, groups_of(log), strict=True)]
            prompts, limits = zip(*((one.prompt, one.limit or most) for one in log.requests()), strict=True)
            tried = tried_drafts(self.run.read_plan(), entry, log, "serial")
            found[entry.batch_size] = Load(list(prompts), list(limits), names, tried)
        return found

    def visits(
        self, folder: Path, settings: Mapping[str, Setting], loads: Mapping[int, Load], launches: int
    ) -> list[Visit]:
        """Every setting launched so many times, in turn and back again, through a journal."""
        asked = {size: (load.prompts, load.limits) for size, load in loads.items()}
        turn: dict[tuple[str, tuple[str, ...]], list[int]] = {}  # a launch serves all batch sizes of the same options
        for name, setting in settings.items():
            for size, (options, _) in setting.items():
                turn.setdefault((name, options), []).append(size)
        order = [(number, *one) for number in range(launches) for one in (list(turn), list(turn)[::-1])[number % 2]]
        key = {"launch": self.launcher.words, "environment": self.launcher.environment, "order": order}
        journal = Journal(folder, {**key, "asked": asked})
        done = journal.finished()
        with progress(f"Launching {len(turn)} servers {launches} times", len(order)) as advance:
            advance(done)
            for number, name, options in order[done:]:
                log = self.run.path / "launches" / f"{name.replace(' ', '-')}-{number + 1}.log"
                load = {size: asked[size] for size in turn[name, options]}
                look = partial(visited, launch=number, name=name, load=load)
                visits = self.launcher.visit(options, log, look)
                journal.append({"visits": [visit.model_dump() for visit in visits]})
                advance(1)
        return [checked(Visit, visit) for document in journal.documents() for visit in document["visits"]]


def conversations_of(source: Mapping[str, Any]) -> list[Conversation]:
    """The conversations of a file or a data set, without tokens, in the order that calibrate takes them in."""
    from treeopt.runtime.prompts.order import order_of, spread
    from treeopt.runtime.prompts.sets import read_conversations

    if (name := source.get("prompts", demo.NAME)) == demo.NAME:
        raise InvalidInput("A server is asked in text, so `prompts` must be a file or a data set, but is none.")
    order = order_of(source)
    told = {key: source.get(key) for key in ("column", "group_by", "split")}
    found = read_conversations(name, **told, order=order)[1].things()
    return found if order.seed is None else [found[i] for i in spread([one.group for one in found], order.seed)]


def asked_of(conversations: Iterable[Conversation], source: Mapping[str, Any]) -> list[Prompt]:
    """The first prompt of each as messages, or as a text where the server is to put no template around it."""
    firsts = [first_turn(conversation.messages) for conversation in conversations]
    if source.get("chat_template", True):
        return list(firsts)
    return [BLANK_LINE.join(message["content"] for message in first) for first in firsts]


def _contender(name: str, setting: Setting, at: Sequence[Visit], load: Load, entry: PlanEntry) -> Contender:
    """What the launches of a setting come to at the batch size of an entry; texts are compared with plain's first launch.

    Steps are of the first launch, spread over its answers.
    """
    plain, known = next(visit for visit in at if visit.name == "plain"), plain_and_chosen(entry)
    visits = [visit for visit in at if visit.name == name]
    predicted = {key: entrant.predicted for key, entrant in known.items()}
    predicted |= {key: tried.rates.estimate for key, tried in load.tried.items()}
    first, draft = visits[0], setting[entry.batch_size][1]
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


def _about_texts(bench: Benchmark) -> list[str]:
    """A sentence on every contender that answers otherwise than plain decoding, or than itself where it is that."""
    return [
        f"At batch size {one.batch_size} {one.name} answers {one.compared - one.identical} of {one.compared} prompts otherwise "
        f"than the first launch of plain decoding: in half precision near ties turn, in float32 the server is at fault."
        for one in bench.contenders
        if one.identical < one.compared
    ]
