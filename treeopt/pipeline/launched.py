"""Bench of a plan by servers that the user's own command starts: a launch for each contender, several times in turn.

launch  one start of a server (`Served`), which answers the prompts of all batch sizes at which it has the same options
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeopt import demo
from treeopt.engines.base import Names
from treeopt.engines.plans import Export, prepare, write_served
from treeopt.engines.registry import engine_named
from treeopt.errors import InvalidInput, Unsupported
from treeopt.files.journal import Journal
from treeopt.files.notes import note
from treeopt.files.places import distinct
from treeopt.files.shell import split_template
from treeopt.files.storage import document, typed
from treeopt.files.writing import discard
from treeopt.pipeline.bench import evenly, usual_prompts
from treeopt.pipeline.contest import Blocks, Contest
from treeopt.pipeline.entrants import Entrant, plain_and_chosen
from treeopt.pipeline.logged import prompts_of, some_requests, tried_drafts
from treeopt.pipeline.session import resolve
from treeopt.planning.table import Candidate
from treeopt.records.benchmark import FEWEST_LAUNCHES, Benchmark
from treeopt.records.contender import Block, Prompt
from treeopt.records.exchange import ExportOptions
from treeopt.records.inputs import inputs_of, model_and_drafter
from treeopt.records.options import BenchOptions, Prompts, Server, Source
from treeopt.records.origins import Provenance, Runtime
from treeopt.records.plan import Plan, PlanEntry, for_all
from treeopt.records.rules import rule_of
from treeopt.records.rundir import LAUNCHABLE, LAUNCHED, RunDirectory
from treeopt.records.stale import stale_plan
from treeopt.records.trace import RankTrace
from treeopt.report.terminal import progress
from treeopt.runtime.prompts.encoder import dialogue, plain_text
from treeopt.serving.launch import Launcher
from treeopt.serving.served import Served
from treeopt.text.rules import MANY

if TYPE_CHECKING:
    from treeopt.runtime.prompts.sets import Conversation

IN_A_ROW = 4  # requests of a conversation: a server keeps what one leaves behind for the next
HEEDED = ("drafter", "prompts", "column", "group_by", "split", "chat_template", "in_order", "seed")
DRAFTER = re.compile(r"\b(?:DRAFTER|HEADS)(?:\.gguf)?\b")


def bench_plan(run: RunDirectory, source: Source, options: BenchOptions, server: Server) -> Benchmark:
    """Answer held-out prompts by servers without speculation, with the plan's options and with the present ones.

    A benchmark of every batch size of the plan, or of the one that is asked for; each is kept, and the first is returned.
    """
    if "clients" in server.given:
        raise InvalidInput("`clients` goes with `lengths`: leave it out.")
    check_heeded({**source.given, "trees": options.trees, "time_limit_s": options.time_limit_s})
    launcher, plan = Launcher.parse(str(server.launch), server.within_s), run.read_plan()
    batch_size, engine = options.batch_size, _engine_of(plan, options.engine)
    names = Names(drafter=None if source.drafter else model_and_drafter(plan, run)[1])
    export = prepare(plan, engine, ExportOptions(batch_size=batch_size), names)
    note(*stale_plan(run, plan), *export.notes)
    entries = [entry for entry in export.plan.entries if batch_size in (None, entry.batch_size)]
    most, loads = _loads(run, plan, entries, options, replace(source, drafter=None))
    servers = Servers(Runtime(name=engine, command=server.launch), launcher, most, run.path / "launches")
    origin = replace(Provenance.here(), acceptance={"rule": "greedy"})
    contests = {}
    for entry in entries:
        load = loads[entry.batch_size]
        entrants = _entrants(servers, export, entry, load, source.drafter, server.present)
        plain = entrants["plain"].stepper
        assert plain is not None
        contests[entry.batch_size] = Contest(plain, entrants, load.prompts, entry.batch_size, origin=origin)
    folder = run.partial(run.bench_in(LAUNCHED).stem)
    blocks, results = in_turn(contests, options.rounds or FEWEST_LAUNCHES, folder), []
    inputs = inputs_of(run.plan, *([run.requests] if run.requests.exists() else []))
    for size, match in contests.items():
        results.append(replace(match.benchmark(blocks[size]), prompts="held out", inputs=inputs))
        run.replace_bench(results[-1], plan, size, LAUNCHED)
    discard(folder)
    return results[0]


def check_heeded(options: Mapping[str, Any], names: Collection[str] = HEEDED) -> None:
    """Raise InvalidInput where an option is given that a launched server does not heed."""
    if strange := sorted(name for name, value in options.items() if value and name not in names):
        raise InvalidInput(
            f"`{strange[0]}` does not go with `launch`, whose command says what is served: leave it out."
        )


def _engine_of(plan: Plan, engine: str | None) -> str:
    """The engine that is named, or that the plan is for; Unsupported where its servers cannot be asked."""
    if rule_of(plan.acceptance) != "greedy":
        raise Unsupported("`launch` asks servers for greedy answers, but the plan is for another rule of acceptance.")
    planned = plan.constraint.engine if plan.constraint else None
    return engine_of_server(engine or (planned.name if planned else ""), LAUNCHABLE)


def engine_of_server(name: str, known: Sequence[str]) -> str:
    """The one of the known engines that a name means; InvalidInput where nothing names one."""
    if not name:
        raise InvalidInput(f"`engine` must say whose server `launch` starts: {', '.join(known)}.")
    return engine_named(name, known)


@dataclass(frozen=True)
class Load:
    """What is asked at one batch size, and what replay says of settings on it, in order."""

    prompts: Sequence[Prompt]
    tried: Mapping[str, Candidate] = field(default_factory=dict)


@dataclass
class Servers:
    """Servers by their options: batch sizes whose options are the same are answered by one launch."""

    runtime: Runtime
    launcher: Launcher
    most: int
    logs: Path
    known: dict[tuple[str, ...], Served] = field(default_factory=dict)

    def of(self, name: str, words: Sequence[str], length: float = inf, environment: Sequence[str] = ()) -> Served:
        """The server of a contender that the command starts with these words, and in this environment."""
        unused = distinct([*(server.setting for server in self.known.values()), name])[-1]
        launcher = self.launcher.within(environment)
        made = Served(self.runtime, launcher, unused, words, self.most, self.logs, length)
        return self.known.setdefault((*environment, *words), made)


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
            texts = zip(chosen, asked_of(chosen, source), strict=True)
            loads[size] = Load([Prompt(text, f"row {one.row}", one.group) for one, text in texts])
        return most, loads
    whole = run.read_requests()
    most = most or int(max(some.max() for some in (whole.answer_tokens, whole.limit) if some is not None))
    for entry in entries:
        log = some_requests(whole, sizes[entry.batch_size], most, MANY, in_a_row=IN_A_ROW)
        loads[entry.batch_size] = Load(prompts_of(log), tried_drafts(plan, entry, log, "serial"))
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


def _entrants(
    servers: Servers, export: Export, entry: PlanEntry, load: Load, drafter: object, present: str | None
) -> dict[str, Entrant]:
    """The contenders at a batch size: plain, as planned, as now, and what else replay says something of."""
    size, known = entry.batch_size, plain_and_chosen(entry)
    known |= {name: Entrant(tried.draft, tried.rates.estimate) for name, tried in load.tried.items()}
    known["chosen"] = replace(known["chosen"], draft=entry.draft)
    _, usual_about = next(iter(export.parts.values()))
    entrants = {}
    for name, entrant in known.items():
        # A plan's draft is the same at every batch size where the engine takes a schedule.
        whole = for_all(entrant.draft), replace(usual_about, batch_size=size)
        part = export.parts[size if size in export.parts else None] if name == "chosen" else whole
        written = write_served(export.method, *part)
        longest = 0 if name == "plain" else inf
        server = servers.of(name, _words(written.options, drafter), longest, written.environment)
        entrants[name] = replace(entrant, stepper=server, is_replayable=False)
    if present is not None:
        server = servers.of("present", split_template("present", present, ()))
        entrants["present"] = Entrant(stepper=server, is_replayable=False)
    return entrants


def _words(words: Sequence[str], drafter: object) -> tuple[str, ...]:
    """What a launch command has behind its model, with the drafter that was given."""
    if drafter is None and (named := next(filter(None, map(DRAFTER.search, words)), None)):
        raise InvalidInput(f"`drafter` must say what the server is to load as {named[0]}: a path or a name.")
    said = {True: json.dumps(str(drafter))[1:-1], False: str(drafter)}  # within JSON or not
    return tuple(said[word.startswith("{")].join(DRAFTER.split(word)) for word in words)


def in_turn(contests: Mapping[int, Contest], rounds: int, folder: Path) -> dict[int, Blocks]:
    """What servers decode of the prompts of each batch size, in turn and back again, through a journal."""
    turns: dict[Served, list[tuple[int, str]]] = {}
    for name in dict.fromkeys(name for match in contests.values() for name in match.contenders):
        for size, match in contests.items():
            if name in match.contenders:
                server = match.contenders[name].stepper
                assert isinstance(server, Served)
                turns.setdefault(server, []).append((size, name))
    launches = [(number, server) for number in range(rounds) for server in [*turns][:: (-1) ** number]]
    first = next(iter(turns))
    asked = {size: [(prompt.text, prompt.limit) for prompt in match.prompts] for size, match in contests.items()}
    order = [(number, server.setting, server.options, server.launcher.environment) for number, server in launches]
    key = {"launch": first.launcher.words, "most": first.most}
    journal = Journal(folder, {**key, "order": order, "asked": asked})
    kept = iter(journal.documents())
    blocks: dict[int, Blocks] = {size: {name: [] for name in match.contenders} for size, match in contests.items()}
    visits = sum(len(turns[server]) for _, server in launches)
    with ExitStack() as stack, progress(f"Launching {len(turns)} servers {rounds} times", visits) as advance:
        for n, (number, server) in enumerate(launches, 1):
            server.number = number
            stack.callback(server.renew)
            for size, name in turns[server]:
                advance(0, f"Launch {n} of {len(launches)}: {name} at {size}")
                if kept_turn := next(kept, None):
                    turn = typed(list[Block], kept_turn["blocks"], journal.folder)
                else:
                    turn = contests[size].turn(name, range(len(contests[size].prompts)), number)
                    journal.append({"blocks": document(turn)})
                blocks[size][name] += turn
                advance(1)
            server.renew()
    return blocks


def conversations_of(source: Source) -> list[Conversation]:
    """The conversations of a file or a data set, without tokens, in the order that calibrate takes them in."""
    from treeopt.runtime.prompts.order import order_of, spread
    from treeopt.runtime.prompts.sets import read_conversations

    if source.prompts in (None, demo.NAME):
        raise InvalidInput("A server is asked in text, so `prompts` must be a file or a data set, but is none.")
    order = order_of(source)
    columns = {"column": source.column, "group_by": source.group_by, "split": source.split}
    found = read_conversations(str(source.prompts), **columns, order=order)[1].things()
    return [found[i] for i in spread([conversation.group for conversation in found], order.seed)]


def asked_of(conversations: Iterable[Conversation], prompts: Prompts) -> list[Any]:
    """The first prompt of each as messages, or as a text where the server is to put no template around it."""
    firsts = [dialogue(conversation.messages, ()) for conversation in conversations]
    return [first if prompts.chat_template else plain_text(first) for first in firsts]
