"""Tune: what speculation brings on a server that is up, and what to start it with next."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from treeopt.engines.measured.exposition import COUNTERS
from treeopt.errors import InvalidInput, TreeoptError
from treeopt.files.writing import replace_together, write_text
from treeopt.pipeline.export import export
from treeopt.pipeline.importing import import_file
from treeopt.pipeline.launched import asked_of, conversations_of
from treeopt.pipeline.profile.untimed import UNKNOWN_CONTEXT
from treeopt.pipeline.search import search
from treeopt.records.calibration import Calibration
from treeopt.records.inputs import inputs_of
from treeopt.records.origins import Provenance, Runtime
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.rundir import RunDirectory
from treeopt.report.page import write_report
from treeopt.report.terminal import note, progress
from treeopt.serving.client import Prompt, Server, drive, together
from treeopt.serving.watch import Pace, Scrape, Stretch, Tuned, Watching, last_stretch, over_plain, read_scrapes, watch

SCRAPES, BEFORE, AFTER = "scrapes.jsonl", "before.txt", "after.txt"
MOST_TOKENS = 256  # of an answer that is asked for
NEARLY = 0.95  # of the guesses that full drafts would have
MOST_PLAIN = 1.001  # tokens per step without a drafter, but for a request that ended between two counters
NO_PLAIN = (
    f"What a plain step takes is not known. Serve without the drafter under this load, watch that, and pass its {SCRAPES} "
    "with `plain`."
)


def tune(run: RunDirectory, url: str, options: Watching) -> Tuned:
    """Watch a server, and write what it counted, a plan and a report to the run directory.

    Raises Unsupported and InvalidInput for a server that does not answer as one.
    """
    import anyio

    plain, drafter = options.plain, options.drafter
    _check_recordings(run, plain, options.overwrite)
    source = {"prompts": options.drive, "in_order": True}
    prompts = asked_of(conversations_of(source), source) if options.drive else []
    others = read_scrapes(Path(plain)) if plain and not options.plain_url else []
    model, scrapes, unknown = anyio.run(_watched, url, options, others, prompts)
    stretch, said = last_stretch(scrapes, url)
    engine = stretch.engine
    unknown += said
    lines = {SCRAPES: "".join(json.dumps(one) + "\n" for one in scrapes)}
    lines |= {BEFORE: stretch.scrapes[0]["metrics"], AFTER: stretch.scrapes[-1]["metrics"]}
    if lines[BEFORE] == lines[AFTER]:
        raise InvalidInput(
            f"{url} must serve while it is watched, but counted nothing: watch it under load, or `drive` it."
        )
    replace_together({run.path / name: partial(write_text, text=text) for name, text in lines.items()})
    mine, calibration = stretch.paces(), _calibration(run, drafter, unknown)
    beside, ratio = _plain(others, str(plain), engine, unknown) if others else {}, None
    if both := [size for size in mine if size in beside]:
        ratio = over_plain([mine[size] for size in both], [beside[size] for size in both])
    elif beside:
        unknown.append(
            "No number of running requests was seen both with the drafter and without: watch both for longer."
        )
    elif calibration is not None:
        unknown.append(NO_PLAIN)
    came = stretch.decoded()
    tokens = came[0] / came[1] if came and came[1] > 0 else None
    if tokens is None and calibration is not None:
        tokens = 1 + sum(calibration.meta["survival"])
    timed = {size: (mine[size], beside[size]) for size in both}
    command = _plan(run, stretch, timed, calibration, unknown) if calibration and timed else None
    found = Tuned(engine=engine, model=model, tokens_per_step=tokens, paces=mine, plain=beside, unknown=tuple(unknown))
    return replace(found, over_plain=ratio, calibration=calibration, command=command)


def _check_recordings(run: RunDirectory, plain: str | None, overwrite: bool) -> None:
    """Raise InvalidInput where the recordings would replace earlier ones, or those of ``plain``, which are still to be read."""
    recordings = [run.path / name for name in (SCRAPES, BEFORE, AFTER)]
    if plain and Path(plain).resolve() in [path.resolve() for path in recordings]:
        raise InvalidInput(
            f"{plain} would be replaced by what is counted now: move it to another folder, or name another `run`."
        )
    if not overwrite:
        run.check_free("what a server counted", [*run.accuracies(), *recordings])


async def _watched(
    url: str, options: Watching, others: list[Scrape], prompts: Sequence[Prompt]
) -> tuple[str, list[Scrape], list[str]]:
    """The model, the scrapes of the server, and what went wrong; those of a plain server that is up are added to ``others``."""
    scrapes, notes, seconds = list[Scrape](), list[str](), 60 * options.minutes

    async def look(server: Server, into: list[Scrape]) -> None:
        notes.extend(await watch(server, seconds, into))

    with progress("Watching", None):
        async with Server(url) as server, Server(options.plain_url or url) as other:
            model = await server.model()
            both = [(server, scrapes), *([(other, others)] if options.plain_url else [])]
            for number in options.clients if prompts else (0,):
                looks = [partial(look, one, into) for one, into in both]
                loads = [partial(_driven, one, prompts, number, seconds) for one, _ in both if prompts]
                await together([*looks, *loads])
    return model, scrapes, notes


async def _driven(server: Server, prompts: Sequence[Prompt], clients: int, seconds: float) -> None:
    """Send the prompts again and again, until the time is over."""
    import anyio

    with anyio.move_on_after(seconds):
        while True:
            await drive(server, list(prompts) * clients, clients=clients, max_tokens=MOST_TOKENS)


def _plain(others: Sequence[Scrape], source: str, engine: str, unknown: list[str]) -> dict[int, Pace]:
    stretch, notes = last_stretch(others, source)
    unknown += [f"Of plain: {note}" for note in notes]
    theirs, found = stretch.engine, stretch.paces()
    if theirs != engine or any(pace.tokens_per_step > MOST_PLAIN for pace in found.values()):
        raise InvalidInput(f"`plain` must be of {engine} without a drafter, but {source} is of {theirs}, or drafts.")
    return found


def _calibration(run: RunDirectory, drafter: str | None, unknown: list[str]) -> Calibration | None:
    """The run's calibration, of what the drafts counted; None where they do not count by position."""
    if "spec_" not in (run.path / AFTER).read_text("utf-8"):
        unknown.append("No drafts are counted: the server has no drafter, or does not say what it does.")
        return None
    try:
        calibration = import_file(run, [run.path / BEFORE, run.path / AFTER], drafter=drafter, overwrite=True)
    except TreeoptError as error:
        unknown.append(f"Acceptance by position is not known. {error}")
        return None
    unknown += calibration.meta["notes"]
    return calibration


def _plan(
    run: RunDirectory,
    stretch: Stretch,
    timed: Mapping[int, tuple[Pace, Pace]],
    calibration: Calibration,
    unknown: list[str],
) -> str | None:
    """Write the profile, the plan, the report and the engine's files; the command that starts it, where there is one."""
    length = calibration.meta["draft_length"]
    drafts, drafted = (stretch.rise(f"{of}_total") for of in COUNTERS[:2])
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
    LatencyProfile(points, plain, Runtime(name=stretch.engine), {**info, "inputs": inputs_of(run.path / SCRAPES)}).save(
        run.profile
    )
    unknown.append(_between(calibration, length, *max(timed.items())[1]))
    try:
        search(run, engine=stretch.engine, batch_sizes=list(timed), measured_only=True)
        note(f"The report is in {write_report(run)[0]}.")
        return export(run, stretch.engine)[1].command
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
