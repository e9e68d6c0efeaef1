"""Bench and profile by servers that the user's own command starts: a launch for each contender, several times in turn.

setting   a contender: the options that it adds to the command, by batch size, and what it drafts
launch    one start of the command with one setting's options, under the load of every batch size that has these options
visit     what a launch answered at one batch size, and what the server counted meanwhile
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from treeopt import demo
from treeopt.engines.base import Request
from treeopt.engines.llama_cpp import PREFIX as OF_LLAMA_CPP
from treeopt.engines.measured.exposition import counters_among, is_exposition
from treeopt.engines.plans import Asked, ask, write_request
from treeopt.engines.vllm import COUNTERS
from treeopt.engines.vllm import PREFIX as OF_VLLM
from treeopt.errors import InvalidInput, TreeoptError, Unsupported
from treeopt.files.fields import checked
from treeopt.files.journal import Journal
from treeopt.files.shell import split_template
from treeopt.files.writing import discard
from treeopt.pipeline.decoding import evenly, usual_prompts
from treeopt.pipeline.entrants import OWN_SETTINGS, PLAIN, plain_and_chosen
from treeopt.pipeline.profile.outcome import check_can_join, finish
from treeopt.pipeline.profile.placement import rivals
from treeopt.pipeline.profile.untimed import UNKNOWN_CONTEXT
from treeopt.pipeline.session import resolve
from treeopt.records.benchmark import FEWEST_LAUNCHES, Benchmark
from treeopt.records.contender import Answer, Block, Contender, Predicted
from treeopt.records.inputs import inputs_of, stale_plan
from treeopt.records.origins import Runtime, provenance
from treeopt.records.plan import Plan, PlanEntry
from treeopt.records.profile import LatencyProfile, ProfileSetting, StepTiming
from treeopt.records.rules import rule_of
from treeopt.records.rundir import LAUNCHED, RunDirectory
from treeopt.report.terminal import note, progress
from treeopt.serving.launch import Launcher
from treeopt.trees.draft import Draft
from treeopt.trees.tree import Tree

if TYPE_CHECKING:
    from treeopt.runtime.prompts.sets import Conversation
    from treeopt.serving.client import Server

# Flags that set a length, without which the engine takes its own; none where it does not start without.
LENGTHS = {"llama-cpp": ("--spec-draft-n-max", "--spec-draft-n-min", "--spec-draft-p-min"), "vllm": ()}
HEEDED = ("drafter", "prompts", "column", "group_by", "split", "chat_template", "in_order", "seed")
STANDS = re.compile(r"\b(?:DRAFTER|HEADS)(?:\.gguf)?\b")
PREFIX = rf"(?:{OF_VLLM}|{OF_LLAMA_CPP})"
WARM_TOKENS = 8
SETTLE_S = 0.5  # until the last step of an answer is counted
PRESENT, PLAIN_NAMES = "present", ("plain", "chain-0")
BLANK_LINE = "\n\n"


class Told(BaseModel):
    """An answer of a visit; ``timed`` where all clients were busy as long as it took."""

    tokens: int
    first_s: float
    seconds: float
    timed: bool
    text: str  # its sha256


class Visit(BaseModel):
    """What a launch answered at a batch size, and the drafts that it counted: of each position how many were accepted."""

    launch: int
    name: str
    batch_size: int = 1
    answers: list[Told] = []
    drafts: int = 0
    reached: list[int] = []
    version: str | None = None

    @property
    def emitted(self) -> int:
        """Tokens that steps emitted: the first of an answer comes of its prompt."""
        return sum(max(answer.tokens - 1, 0) for answer in self.answers)

    @property
    def steps(self) -> int:
        """Steps of all answers: the drafts, or where some steps had none what the accepted guesses leave."""
        return min(max(self.drafts, self.emitted - sum(self.reached)), self.emitted)

    @property
    def tokens_per_step(self) -> float:
        return self.emitted / self.steps if self.steps else 1.0


@dataclass(frozen=True)
class Setting:
    """A contender; its draft is None where the server decides it."""

    options: Mapping[int, tuple[str, ...]]
    drafts: Mapping[int, Draft] = field(default_factory=dict)

    @property
    def launches(self) -> dict[tuple[str, ...], list[int]]:
        """The different options, each with its batch sizes, which one launch can serve."""
        found: dict[tuple[str, ...], list[int]] = {}
        for size, options in self.options.items():
            found.setdefault(options, []).append(size)
        return found


@dataclass(frozen=True)
class Prompt:
    """What is asked: a text, or the messages of a chat."""

    id: str
    group: str
    asked: str | list[dict[str, str]]


def bench_launched(
    run: RunDirectory,
    launch: str,
    *,
    present: str | None = None,
    batch_size: int | None = None,
    num_prompts: int | None = None,
    max_new_tokens: int | None = None,
    rounds: int | None = None,
    **options: Any,
) -> list[Benchmark]:
    """Answer held-out prompts by servers with the plan's options, without, with the present ones and with the engine's own.

    A benchmark of every batch size of the plan, or of the one that is asked; each is kept.
    """
    contest = Contest.opened(run, launch, batch_size, **options)
    drafts = {entry.batch_size: entry.draft for entry in contest.entries}
    plain, chosen = {size: contest.options(size, PLAIN) for size in drafts}, contest.planned
    settings = {"plain": Setting(plain, dict.fromkeys(drafts, PLAIN)), "chosen": Setting(chosen, drafts)}
    if present is not None:
        settings[PRESENT] = Setting(dict.fromkeys(drafts, split_template("present", present, ())))
    own = {size: _without(words, LENGTHS[contest.engine]) for size, words in chosen.items()}
    if own != chosen:
        settings[OWN_SETTINGS] = Setting(own)
    most, folder = max_new_tokens or contest.max_new_tokens, run.partial(f"bench-{LAUNCHED}")
    prompts = {size: contest.prompts(num_prompts or usual_prompts(size)) for size in drafts}
    visits = contest.visits(folder, settings, prompts, most, rounds or FEWEST_LAUNCHES)
    results = []
    for entry in contest.entries:
        at = [visit for visit in visits if visit.batch_size == entry.batch_size]
        runtime: Runtime = {"name": contest.engine, "version": at[0].version, "command": launch}
        found = Benchmark(
            contenders=tuple(
                _contender(name, one, at, prompts[entry.batch_size], entry) for name, one in settings.items()
            ),
            prompts="held out",
            inputs=inputs_of(run.plan),
            max_new_tokens=most,
            provenance=provenance(drafter=contest.plan.drafter, acceptance={"rule": "greedy"}, engine=runtime),
        )
        run.replace_bench(found, contest.plan, entry.batch_size, LAUNCHED)
        note(*_about_texts(found))
        results.append(found)
    discard(folder)
    return results


def profile_launched(run: RunDirectory, launch: str, *, overwrite: bool = False, **options: Any) -> LatencyProfile:
    """Time plain steps and the settings alone that the plan cannot tell apart: the chosen length, its neighbours, the best others.

    A sample is the mean step of a launch.
    """
    contest = Contest.opened(run, launch, None, **options)
    runtime: Runtime = {"name": contest.engine, "command": launch}
    made = provenance(drafter=contest.plan.drafter)
    check_can_join(run, runtime, made, overwrite=overwrite)
    wanted: dict[str, dict[int, Draft]] = {}
    for entry in contest.entries:
        near = {depth for size, depth in rivals(entry, ()) if size == depth + 1}
        for depth in sorted({0, entry.draft.depth, *near}):
            wanted.setdefault(f"chain-{depth}", {})[entry.batch_size] = Tree.chain(depth)
    settings = {
        name: Setting({size: contest.options(size, draft) for size, draft in drafts.items()}, drafts)
        for name, drafts in sorted(wanted.items())
    }
    prompts = {entry.batch_size: contest.prompts(usual_prompts(entry.batch_size)) for entry in contest.entries}
    folder = run.partial("profile") / LAUNCHED
    visits = contest.visits(folder, settings, prompts, contest.max_new_tokens, FEWEST_LAUNCHES)
    timed = [_timing(visits, name, size, draft) for name, one in settings.items() for size, draft in one.drafts.items()]
    plain = tuple(timing for timing in timed if timing.size == 1)
    at = [ProfileSetting(batch_size=p.batch_size, context_tokens=p.context_tokens, nominal=False) for p in plain]
    info = {"measures": "step", "settings": at, "provenance": made, "inputs": inputs_of(run.plan)}
    launches = FEWEST_LAUNCHES * sum(len(one.launches) for one in settings.values())
    note(f"Timed in {launches} launches: {', '.join(settings)}, {FEWEST_LAUNCHES} times each.")
    return finish(run, LatencyProfile(tuple(t for t in timed if t.size > 1), plain, runtime, info), None)


@dataclass(frozen=True)
class Contest:
    """A plan as an engine is told of it, and the launches of its servers.

    given : options of the drafter and the prompts
    """

    run: RunDirectory
    launcher: Launcher
    plan: Plan
    engine: str
    asked: Asked
    entries: Sequence[PlanEntry]
    given: dict[str, Any]

    @classmethod
    def opened(
        cls,
        run: RunDirectory,
        launch: str,
        batch_size: int | None,
        *,
        engine: str | None = None,
        within_s: float,
        **given: Any,
    ) -> Contest:
        """Raises InvalidInput or Unsupported, before anything is launched, for what cannot be served."""
        launcher, plan = Launcher.parse(launch, within_s), run.read_plan()
        if strange := sorted(given.keys() - set(HEEDED)):
            raise InvalidInput(
                f"`{strange[0]}` does not go with `launch`, whose command says what is served: leave it out."
            )
        if rule_of(plan.acceptance) != "greedy":
            raise Unsupported(
                "`launch` asks servers for greedy answers, but the plan is for another rule of acceptance."
            )
        planned = plan.constraint.engine.name if plan.constraint and plan.constraint.engine else None
        if (name := engine or planned) not in LENGTHS:
            raise InvalidInput(
                f"`engine` must say whose server `launch` starts, {' or '.join(LENGTHS)}, but got {name}."
            )
        note(*stale_plan(run, plan))
        asked = ask(plan, str(name), batch_size=batch_size)
        entries = [entry for entry in asked.plan.entries if batch_size in (None, entry.batch_size)]
        note(*asked.notes)
        return cls(run, launcher, plan, str(name), asked, entries, given)

    @property
    def planned(self) -> dict[int, tuple[str, ...]]:
        """The options of the plan, by batch size: the same where the engine takes a schedule."""
        requests = {
            e.batch_size: self.asked.requests.get(e.batch_size, self.asked.requests.get(None)) for e in self.entries
        }
        return {size: self._words(request) for size, request in requests.items() if request}

    def options(self, batch_size: int, chain: Tree) -> tuple[str, ...]:
        """The options for a chain at every batch size, where so many sequences are decoded."""
        request = next(iter(self.asked.requests.values()))
        return self._words(replace(request, batch_size=batch_size, tree=chain, lengths=(), dynamic=None, settings=()))

    def _words(self, request: Request) -> tuple[str, ...]:
        """What a launch command has behind its model, with the drafter that was given."""
        words = shlex.split(write_request(request, self.asked.way, self.engine).command)
        words = words[1 + max(i for i, word in enumerate(words) if word.startswith("MODEL")) :]
        drafter = self.given.get("drafter")
        if drafter is None and (named := next(filter(None, map(STANDS.search, words)), None)):
            raise InvalidInput(f"`drafter` must say what the server is to load as {named[0]}: a path or a name.")
        quoted = {True: json.dumps(str(drafter))[1:-1], False: str(drafter)}
        return tuple(STANDS.sub(lambda _, word=word: quoted[word.startswith("{")], word) for word in words)  # type: ignore[misc]

    @cached_property
    def max_new_tokens(self) -> int:
        return int(self.run.read_trace().meta.get("max_new_tokens", 128)) if self.run.trace.exists() else 128

    @cached_property
    def _held_out(self) -> list[Conversation]:
        """Conversations that the run was not calibrated with, by their places in the order that calibrate takes them in.

        Without the model nobody knows which of them were too long, so as many more are left out as were skipped.
        """
        from treeopt.runtime.prompts.order import MOST_DRAWN, Order, spread
        from treeopt.runtime.prompts.sets import read_conversations

        own = {name: value for name, value in self.given.items() if name != "drafter"}
        source = resolve(self.run, own)
        if (name := source.get("prompts", demo.NAME)) == demo.NAME:
            raise InvalidInput(
                "`launch` asks a server in text, so `prompts` must be a file or a data set, but is none."
            )
        seed = None if source.get("in_order") else source.get("seed", 0)
        options = {key: source.get(key) for key in ("column", "group_by", "split")}
        _, drawn, *_ = read_conversations(name, **options, order=Order(seed, max(source.get("drawn", 0), MOST_DRAWN)))
        found = drawn.things()
        found = found if seed is None else [found[i] for i in spread([one.group for one in found], seed)]
        trace = self.run.read_trace() if self.run.trace.exists() else None
        if trace is None or (trace.meta.get("source") or {}).get("prompts") != name:
            return found
        groups = trace.conversation_groups()
        seen = Counter(groups or [""] * len(set(trace.clusters.tolist())))
        skipped, left = len(trace.meta.get("skipped") or ()), []
        for one in found:
            group = one.group if groups else ""
            seen[group] -= 1
            left += [one] if seen[group] < -skipped else []
        if not left:
            raise InvalidInput(f"`prompts` must leave some for bench, but all of {name} may have been calibrated on.")
        return left

    def prompts(self, wanted: int) -> list[Prompt]:
        """So many held-out prompts, as messages, or as texts where the server is to put no template around them."""
        source = resolve(self.run, {k: v for k, v in self.given.items() if k == "chat_template"})
        found = []
        for one in evenly(self._held_out, wanted):
            first = one.messages[: 1 + next(i for i, (role, _) in enumerate(one.messages) if role == "user")]
            text = BLANK_LINE.join(said for _, said in first)
            chat = [{"role": role, "content": said} for role, said in first]
            found.append(Prompt(f"row {one.row}", one.group, chat if source.get("chat_template", True) else text))
        if len(found) < wanted:
            note(f"Only {len(found)} held-out prompts are left, fewer than the {wanted} asked for.")
        return found

    def visits(
        self,
        folder: Path,
        settings: Mapping[str, Setting],
        prompts: Mapping[int, Sequence[Prompt]],
        most: int,
        launches: int,
    ) -> list[Visit]:
        """Every setting launched so many times, in turn and back again, through a journal."""
        import anyio

        turn = [(name, options, sizes) for name, one in settings.items() for options, sizes in one.launches.items()]
        order = [(number, *one) for number in range(launches) for one in (turn, turn[::-1])[number % 2]]
        key = {"launch": self.launcher.words, "environment": self.launcher.environment, "order": order, "most": most}
        journal = Journal(folder, {**key, "prompts": {size: [one.asked for one in of] for size, of in prompts.items()}})
        done = journal.finished()
        with progress(f"Launching {len(turn)} servers {launches} times", len(order)) as advance:
            advance(done)
            for number, name, options, sizes in order[done:]:
                log = self.run.path / "launches" / f"{folder.name.partition('.')[0]}-{name}-{number + 1}.log"
                with self.launcher.launched(options, log) as url:
                    asked = {size: prompts[size] for size in sizes}
                    found = anyio.run(_answered, url, Visit(launch=number, name=name), asked, most)
                journal.append({"visits": [visit.model_dump() for visit in found]})
                advance(1)
        return [checked(Visit, visit) for document in journal.documents() for visit in document["visits"]]


async def _answered(url: str, visit: Visit, prompts: Mapping[int, Sequence[Prompt]], most: int) -> list[Visit]:
    """What a server answers and counts at every batch size."""
    import anyio

    from treeopt.serving.client import Server
    from treeopt.serving.load import drive

    found = []
    async with Server(url) as server:
        version = await _version(server)
        for size, of in prompts.items():
            asked = [one.asked for one in of]
            await drive(server, asked[:size], clients=size, max_tokens=min(WARM_TOKENS, most))
            before = await _metrics(server, visit.name)
            load = await drive(server, asked, clients=size, max_tokens=most)
            await anyio.sleep(SETTLE_S)
            drafts, reached = _drafts(before, await _metrics(server, visit.name))
            timed = set(load.timed)
            answers = [
                Told(
                    tokens=one.num_tokens, first_s=one.first_s, seconds=one.seconds, timed=i in timed,
                    text=hashlib.sha256(one.text.encode("utf-8", "surrogatepass")).hexdigest(),
                )
                for i, one in enumerate(load.answers)
            ]  # fmt: skip
            about = {"batch_size": size, "answers": answers, "drafts": drafts, "reached": reached, "version": version}
            found.append(visit.model_copy(update=about))
    return found


async def _version(server: Server) -> str | None:
    """The release of the server, where it says it."""
    for path, key in (("/version", "version"), ("/props", "build_info")):
        with suppress(TreeoptError):
            if isinstance(page := await server.json(path), dict) and isinstance(page.get(key), str):
                return str(page[key])[:100]
    return None


async def _metrics(server: Server, name: str) -> str:
    """The counters; empty where plain decoding has none."""
    from treeopt.serving.client import NoSuchPage

    try:
        return await server.text("/metrics")
    except NoSuchPage as error:
        if name in PLAIN_NAMES:
            return ""
        raise Unsupported(
            f"{error} Tokens per step are of its counters: have `launch` serve them (llama-server: --metrics)."
        ) from None


def _drafts(before: str, after: str) -> tuple[int, list[int]]:
    """Drafts between two scrapes, and of each position how many were accepted; none where a server does not speculate."""
    files = [(text, Path("/metrics")) for text in (before, after) if is_exposition(text, PREFIX)]
    counters = counters_among(files, PREFIX, COUNTERS)
    return (counters.sum(COUNTERS[0]) or 0, counters.by_position(COUNTERS[3], "position")) if counters else (0, [])


def _contender(
    name: str, setting: Setting, at: Sequence[Visit], prompts: Sequence[Prompt], entry: PlanEntry
) -> Contender:
    """What the launches of a setting come to at the batch size of an entry; texts are compared with plain's first launch.

    Steps are of the first launch: each launch answers the same.
    """
    plain = next(visit for visit in at if visit.name == "plain")
    visits = [visit for visit in at if visit.name == name]
    first, known = visits[0], plain_and_chosen(entry)
    draft = setting.drafts.get(first.batch_size) or Tree.chain(len(first.reached))
    if draft.depth and not first.drafts:
        note(f"The server of {name!r} counted no drafts at batch size {first.batch_size}: its tokens per step are 1.")
    ends = [round(first.steps * part) for part in _shares([max(one.tokens - 1, 0) for one in first.answers])]
    return Contender(
        name=name,
        batch_size=first.batch_size,
        draft=draft,
        sequences=[
            Answer(
                id=prompt.id, group=prompt.group, tokens=max(answer.tokens, 1), steps=end - begin,
                identical=all(visit.answers[i].text == plain.answers[i].text for visit in visits),
            )
            for i, (prompt, answer, begin, end) in enumerate(zip(prompts, first.answers, [0, *ends], ends, strict=False))
        ],
        blocks=[
            Block(
                round=visit.launch, prompts=[i], tokens=one.tokens - 1, steps=round((one.tokens - 1) / visit.tokens_per_step),
                decode_s=(one.seconds - one.first_s) / visit.batch_size, group=prompts[i].group,
            )
            for visit in visits
            for i, one in enumerate(visit.answers)
            if one.timed and one.tokens > 1
        ],
        predicted=known[name].predicted if name in known else Predicted(),
        accepted=[a - b for a, b in pairwise([first.drafts, *first.reached, 0])] if first.drafts else [],
        spread=True,
    )  # fmt: skip


def _shares(tokens: Sequence[int]) -> list[float]:
    """How much of all tokens there is up to the end of each answer."""
    return [part / max(sum(tokens), 1) for part in accumulate(tokens)]


def _timing(visits: Sequence[Visit], name: str, batch_size: int, draft: Draft) -> StepTiming:
    """The mean step of every launch."""
    found = [visit for visit in visits if (visit.name, visit.batch_size) == (name, batch_size)]
    step_ms = []
    for visit in found:
        timed = [one for one in visit.answers if one.timed and one.tokens > 1]
        seconds, tokens = sum(one.seconds - one.first_s for one in timed), sum(one.tokens - 1 for one in timed)
        if not seconds:
            raise InvalidInput(f"`prompts` must fill a batch of {batch_size}, but {len(visit.answers)} are too few.")
        step_ms.append(1e3 * visit.tokens_per_step * seconds / tokens)
    accepted = sum(visit.tokens_per_step for visit in found) / len(found) - 1
    return StepTiming(
        batch_size,
        UNKNOWN_CONTEXT,
        len(draft),
        draft.depth,
        tuple(step_ms),
        accepted,
        tuple(visit.launch for visit in found),
    )


def _about_texts(bench: Benchmark) -> list[str]:
    """A sentence on every contender that answers otherwise than plain decoding, or than itself where it is that."""
    return [
        f"At batch size {one.batch_size} {one.name} answers {one.compared - one.identical} of {one.compared} prompts otherwise "
        f"than the first launch of plain decoding: in half precision near ties turn, in float32 the server is at fault."
        for one in bench.contenders
        if one.identical < one.compared
    ]


def _without(words: Sequence[str], flags: Sequence[str]) -> tuple[str, ...]:
    """The words without some flags and their values."""
    return tuple(word for before, word in pairwise(["", *words]) if word not in flags and before not in flags)
