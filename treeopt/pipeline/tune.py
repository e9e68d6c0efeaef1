"""Tune: what speculation brings on a server that is up, and what to start it with next."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np

from treeopt.arms.tuned import TunedArms, columns_of, read_arms, tune_arms
from treeopt.engines.base import Names
from treeopt.errors import InvalidInput, TreeoptError
from treeopt.files.options import Options
from treeopt.files.writing import replace_together, write_text
from treeopt.pipeline.export import export
from treeopt.pipeline.importing import import_accuracies
from treeopt.pipeline.launched import asked_of, conversations_of
from treeopt.pipeline.profile.untimed import UNKNOWN_CONTEXT
from treeopt.pipeline.search import search
from treeopt.records.calibration import Calibration
from treeopt.records.exchange import Beyond, ExportOptions, ImportOptions, TableOptions, Watching
from treeopt.records.inputs import inputs_of
from treeopt.records.options import SearchOptions, Source, TreeLimits
from treeopt.records.origins import Provenance, Runtime
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.rundir import RunDirectory
from treeopt.report.page import write_report
from treeopt.report.terminal import progress
from treeopt.serving.client import Prompt, Server, check_open_files, run_async, together
from treeopt.serving.watch import ENGINES, Pace, Recording, Tuned, find_counters, over_plain, watch

WATCHED, PLAIN, BEFORE, AFTER = "watched.json", "watched-plain.json", "before.txt", "after.txt"
MOST_TOKENS = 256  # of an answer that is asked for
MOST_REFUSED, REFUSED_S = 20, 1.0  # prompts in a row; that a client waits after one
NEARLY = 0.95  # of the guesses that full drafts would have
MOST_TIMES_SLOWER = 100  # than plain, that is believed
MOST_PLAIN = 1.001  # tokens per step without a drafter, but for a request that ended between two counters
NO_DRAFTS = "No drafts are counted: the server has no drafter, or does not say what it does."
RESTARTED = "The server restarted while it was watched: what it did before is left out."
NO_PLAIN = (
    f"What a plain step takes is not known. Serve without the drafter under this load, watch that, and pass its {WATCHED} "
    "with `plain`."
)


def tune_sources(
    run: RunDirectory, sources: Sequence[str], watching: Watching, table: TableOptions
) -> Tuned | TunedArms:
    """What a server does now, where the source is a URL, or the decision among settings that were run."""
    if any("://" in source for source in sources):
        _check_heeded(table, watching, "files")
        if len(sources) > 1:
            raise InvalidInput("One server is watched at a time: pass its URL alone.")
        with run.writing():
            return tune(run, sources[0], watching)
    _check_heeded(watching, table, "the URL of a server")
    if not sources and not run.arms.exists():
        raise InvalidInput(f"{run.path} has no settings that were run yet: pass files of them, or the URL of a server.")
    return tune_arms(read_arms(list(map(Path, sources)) or [run.path], columns_of(table.columns)), table)


def _check_heeded(options: Options, heeded: Options, source: str) -> None:
    """Raise InvalidInput for an option that goes with another kind of source, unless what is heeded has it too."""
    for name, value in options.given.items():
        if heeded.given.get(name) != value:
            raise InvalidInput(f"`{name}` goes with {source}: leave it out.")


def tune(run: RunDirectory, url: str, options: Watching) -> Tuned:
    """Watch a server, and write what it counted, a plan and a report to the run directory.

    What was seen is kept whatever ends the watch, and added to what the run holds of the server. Raises Unsupported and
    InvalidInput for a server that does not answer as one.
    """
    recording, beside, unknown = _watched(run, url, options)
    if not any(recording.rises.values()):
        late = ["A request is counted when it ends: watch for longer."] if ENGINES[recording.engine].at_end else []
        nothing = f"{url} must serve while it is watched, but counted nothing: watch it under load, or `drive` it."
        raise InvalidInput(" ".join([nothing, *late, *unknown]))
    unknown += [RESTARTED] * recording.restarted
    calibration, (paces, notes) = _calibration(run, recording, options.drafter, unknown), recording.paces()
    plain = _plain(beside, recording.engine, unknown) if beside else {}
    both = [size for size in paces if size in plain]
    ratio = over_plain([paces[size] for size in both], [plain[size] for size in both]) if both else None
    if ratio and not 1 / MOST_TIMES_SLOWER < ratio.value < 1.1 * (recording.guesses + 1):
        notes.append(f"{url} counts what cannot be beside plain: {ratio.value:.3g} times its throughput.")
        ratio, both = None, []
    elif beside and not both:
        unknown.append(
            "No number of running requests was seen both with the drafter and without: watch both for longer."
        )
    elif calibration is not None and not beside:
        unknown.append(NO_PLAIN)
    tokens = recording.tokens_per_step
    if tokens is None and calibration is not None and not ENGINES[recording.engine].seconds:
        tokens = 1 + sum(calibration.meta["survival"])
    timed = {size: (paces[size], plain[size]) for size in both}
    command = _plan(run, recording, timed, calibration, unknown, options.beyond) if calibration and timed else None
    return Tuned(
        engine=recording.engine,
        model=recording.model,
        tokens_per_step=tokens,
        paces=paces,
        plain=plain,
        over_plain=ratio,
        calibration=calibration,
        command=command,
        unknown=(*unknown, *notes),
    )


@dataclass
class Watched:
    """A server that is watched, and the file that keeps what is seen of it."""

    url: str
    path: Path
    recording: Recording | None

    async def begun(self, server: Server, failures: list[str]) -> Callable[[], Awaitable[None]]:
        """Look for the first time, and return what looks on."""
        page, recording = await find_counters(server)
        if self.recording:
            self.recording.check_same(recording, self.path)
            self.recording.add(recording.after)
        self.recording = self.recording or recording
        return partial(watch, server, page, self.recording, failures)


def _watched(run: RunDirectory, url: str, options: Watching) -> tuple[Recording, Recording | None, list[str]]:
    """What was seen of the server and of the plain one, and what went wrong; the run keeps it whatever ends the watch."""
    files, plain = {url: run.path / WATCHED}, options.plain
    if plain and Path(plain).resolve() == files[url].resolve():
        raise InvalidInput(
            f"{plain} would be added to by what is counted now: move it to another folder, or name another `run`."
        )
    if not (options.overwrite or files[url].exists()):
        run.check_free("what a server counted", run.accuracies())
    beside = Recording.load(Path(plain)) if plain and not options.plain_url else None
    if options.plain_url:
        files[options.plain_url] = run.path / PLAIN
    source = Source(prompts=options.drive, in_order=True)
    prompts = asked_of(conversations_of(source), source) if options.drive else []
    check_open_files(max(options.clients) * len(files))
    watched = [
        Watched(name, path, Recording.load(path) if path.exists() and not options.overwrite else None)
        for name, path in files.items()
    ]
    try:
        with progress("Watching", None):
            notes = run_async(partial(_watch, watched, prompts, options))
    finally:
        for one in watched:
            if one.recording:
                one.recording.save(one.path)
    mine, *others = (one.recording for one in watched if one.recording)
    texts = {BEFORE: mine.before, AFTER: mine.after}
    replace_together({run.path / name: partial(write_text, text=text) for name, text in texts.items()})
    return mine, others[0] if others else beside, notes


async def _watch(watched: Sequence[Watched], prompts: Sequence[Prompt], options: Watching) -> list[str]:
    """Watch servers at the same time with each number of clients; what went wrong once they had been looked at."""
    import anyio

    notes, failures, refusals = list[str](), list[str](), list[str]()
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(Server(one.url)) for one in watched]
        looks = [await one.begun(server, failures) for one, server in zip(watched, servers, strict=True)]
        for clients in options.clients if prompts else (0,):
            loads = [partial(_ask_on, server, prompts, clients, refusals) for server in servers if prompts]
            try:
                with anyio.move_on_after(60 * options.minutes):
                    await together([*looks, *loads])
            except TreeoptError as error:
                notes.append(f"Watching ended early. {error}")
                break
    for name, errors in (("looks", failures), ("answers to prompts", refusals)):
        notes += [f"{len(errors)} {name} failed, the last because: {errors[-1]}"] if errors else []
    return notes


async def _ask_on(server: Server, prompts: Sequence[Prompt], clients: int, refused: list[str]) -> None:
    """Send the prompts again and again; those that are refused are left out, unless nothing else is answered."""
    import anyio

    following, in_a_row = cycle(prompts), 0

    async def client() -> None:
        nonlocal in_a_row
        for prompt in following:
            try:
                await server.complete(prompt, MOST_TOKENS)
                in_a_row = 0
            except TreeoptError as error:
                refused.append(str(error))
                in_a_row += 1
                if in_a_row >= MOST_REFUSED:
                    raise
                await anyio.sleep(REFUSED_S)

    await together([client] * clients)


def _plain(beside: Recording, engine: str, unknown: list[str]) -> dict[int, Pace]:
    paces, notes = beside.paces()
    unknown += [f"Of plain: {note}" for note in [*([RESTARTED] * beside.restarted), *notes]]
    if beside.engine != engine or any(pace.tokens_per_step > MOST_PLAIN for pace in paces.values()):
        raise InvalidInput(
            f"`plain` must be of {engine} without a drafter, but {beside.server} is of {beside.engine}, or drafts."
        )
    return paces


def _calibration(
    run: RunDirectory, recording: Recording, drafter: str | None, unknown: list[str]
) -> Calibration | None:
    """The run's calibration, of what the drafts counted; None where they do not count by position."""
    if "spec_" not in recording.after:
        unknown.append(NO_DRAFTS)
        return None
    try:
        calibration = import_accuracies(
            run, [run.path / BEFORE, run.path / AFTER], ImportOptions(drafter=drafter, overwrite=True)
        )
    except TreeoptError as error:
        unknown.append(f"Acceptance by position is not known. {error}" if recording.guesses else NO_DRAFTS)
        return None
    unknown += calibration.meta["notes"]
    return calibration


def _plan(
    run: RunDirectory,
    recording: Recording,
    timed: Mapping[int, tuple[Pace, Pace]],
    calibration: Calibration,
    unknown: list[str],
    beyond: Beyond,
) -> str | None:
    """Write the profile, the plan, the report and the engine's files; the command that starts it, where there is one."""
    length = calibration.meta["draft_length"]
    drafts, drafted = recording.drafted
    # The last drafts of answers are shorter, where fewer tokens are left.
    are_full = 0 < NEARLY * calibration.num_heads * drafts <= drafted
    if calibration.meta["ends_are_misses"] or are_full:
        length = calibration.num_heads
    if length is None:
        unknown.append("Drafts had several lengths, and steps are not timed by length: nothing is planned.")
        return None
    points = tuple(_timing(n, pace, length + 1, calibration.drafted, idle.step_ms) for n, (pace, idle) in timed.items())
    plain = tuple(_timing(n, pace, 1) for n, (_, pace) in timed.items())
    info = {"measures": "step", "provenance": replace(Provenance.here(), machine=None, versions=None).record}
    LatencyProfile(
        points, plain, Runtime(name=recording.engine), {**info, "inputs": inputs_of(run.path / WATCHED)}
    ).save(run.profile)
    unknown.append(_between(calibration, length, *max(timed.items())[1]))
    try:
        wanted = SearchOptions(engine=recording.engine, batch_sizes=list(timed))
        unknown += search(run, wanted, TreeLimits(measured_only=True)).notes
        write_report(run)
        options = ExportOptions(beyond=beyond)
        written = export(run, recording.engine, options, names=Names(recording.model))[1]
        unknown += written.notes
        return written.command
    except TreeoptError as error:
        unknown.append(f"No launch options were written. {error}")
        return None


def _between(calibration: Calibration, length: int, mine: Pace, plain: Pace) -> str:
    """What lengths between the one served and none would give, if every guess adds as much to a step."""
    tokens = 1 + calibration.drafted * np.cumsum([0, *calibration.meta["survival"]])[: length + 1]
    speeds = tokens / np.linspace(plain.step_ms, mine.step_ms, length + 1)
    said = f"Steps of {length} guesses and of none were timed: whether a length between is faster is not known."
    best = int(speeds.argmax())
    if best in (0, length):
        return said
    return (
        f"{said} If every guess adds as much to a step, {best} guesses would have {speeds[best] / speeds[-1]:.2f} times the "
        "throughput of now: compare them by bench --launch --lengths, or serve them and watch again."
    )


def _timing(batch_size: int, pace: Pace, size: int, drafted: float = 1.0, plain_ms: float = 0.0) -> StepTiming:
    """Steps of ``size`` rows, where a share ``drafted`` of those that were timed had a draft, and the others were plain."""
    all_ms = 1000 * pace.blocks[:, 2] / pace.blocks[:, 1]
    samples = tuple(((all_ms - (1 - drafted) * plain_ms) / drafted).tolist())
    return StepTiming(batch_size, UNKNOWN_CONTEXT, size=size, depth=size - 1, step_ms=samples)
