"""Tune: what speculation brings on a server that is up, and what to start it with next."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from treeopt.errors import InvalidInput, TreeoptError, first_line
from treeopt.files.parameters import Count, Positive
from treeopt.files.writing import replace_together, write_text
from treeopt.pipeline.export import export
from treeopt.pipeline.importing import check_nothing_lost, import_file
from treeopt.pipeline.search import search
from treeopt.records.inputs import inputs_of
from treeopt.records.origins import Runtime, provenance
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.rundir import RunDirectory
from treeopt.report.page import write_report
from treeopt.report.terminal import note, progress
from treeopt.runtime.prompts.asked import read_asked
from treeopt.runtime.prompts.files import read_rows
from treeopt.serving.client import Prompt, Server
from treeopt.serving.load import drive as ask
from treeopt.serving.tuned import Tuned
from treeopt.serving.watch import Pace, Scrape, last_stretch, over_plain, paces, read_scrapes, watch

SCRAPES, BEFORE, AFTER = "scrapes.jsonl", "before.txt", "after.txt"
UNKNOWN_CONTEXT = 0
MOST_TOKENS = 256  # of an answer that is asked for


def tune(
    run: RunDirectory,
    url: str,
    *,
    minutes: Positive = 5,
    plain: str | None = None,
    drafter: str | None = None,
    drive: str | None = None,
    clients: Sequence[Count] = (1,),
    overwrite: bool = False,
) -> Tuned:
    """Watch a server, and write what it counted, a plan and a report to the run directory.

    minutes        : how long to watch, with each number of ``clients``
    plain          : a server without a drafter to be watched beside it, or scrapes.jsonl of one that was watched before
    drafter        : what makes the drafts, which counters do not say: eagle3, draft-model, ngram, mtp
    drive          : file of prompts to send, in closed loops; by default nothing is sent but GETs
    clients        : how many prompts are sent at once, one number after another
    overwrite      : replace the run's trace and calibration

    Raises Unsupported and InvalidInput for a server that does not answer as one.
    """
    import anyio

    if not overwrite:
        check_nothing_lost(run, "what a server counted replaces")
    prompts = _prompts(drive) if drive else []
    path = Path(plain) if plain and "://" not in plain else None
    others = read_scrapes(path) if path else []
    model, scrapes, notes = anyio.run(
        partial(_watched, url, plain if path is None else None, others, minutes, prompts, clients)
    )
    engine, stretch, said = last_stretch(scrapes, url)
    lines = {SCRAPES: "".join(json.dumps(one) + "\n" for one in scrapes)}
    lines |= {BEFORE: stretch[0]["metrics"], AFTER: stretch[-1]["metrics"]}
    replace_together({run.path / name: partial(write_text, text=text) for name, text in lines.items()})
    found = Tuned(
        engine=engine, model=model, paces=paces(engine, stretch), plain={}, calibration=None, over_plain=None, command=None,
        unknown=(*notes, *said),
    )  # fmt: skip
    if others:
        found = _beside(found, others, str(plain))
    return _planned(run, _counted(run, found, drafter))


async def _watched(
    url: str, plain: str | None, others: list[Scrape], minutes: float, prompts: Sequence[Prompt], clients: Sequence[int]
) -> tuple[str, list[Scrape], list[str]]:
    """The model, the scrapes of the server, and what went wrong; those of plain are added to ``others``."""
    import anyio

    scrapes, notes = list[Scrape](), list[str]()

    async def look(server: Server, into: list[Scrape]) -> None:
        notes.extend(await watch(server, 60 * minutes, into))

    with progress("Watching", None):
        async with Server(url) as server, Server(plain or url) as other:
            model = await server.model()
            for number in clients if prompts else (0,):
                async with anyio.create_task_group() as group:
                    group.start_soon(look, server, scrapes)
                    if plain:
                        group.start_soon(look, other, others)
                    if prompts:
                        for one in (server, other) if plain else (server,):
                            group.start_soon(_driven, one, prompts, number, 60 * minutes)
    return model, scrapes, notes


async def _driven(server: Server, prompts: Sequence[Prompt], clients: int, seconds: float) -> None:
    """Send the prompts again and again, until the time is over."""
    import anyio

    with anyio.move_on_after(seconds):
        while True:
            await ask(server, list(prompts) * clients, clients=clients, max_tokens=MOST_TOKENS)


def _prompts(file: str) -> list[Prompt]:
    """The first turns of a file's rows, as chats; a row without one is left out."""
    found = list[Prompt]()
    for _, record in read_rows(file).found:
        try:
            turns = read_asked(record, None, None)[0] if isinstance(record, dict) else ()
        except ValueError:
            continue
        end = next((i for i, (role, _) in enumerate(turns, 1) if role == "user"), 0)
        found += [[{"role": role, "content": text} for role, text in turns[:end]]] if end else []
    if not found:
        raise InvalidInput(f"`drive` must have prompts, but {file} has none.")
    return found


def _beside(found: Tuned, others: Sequence[Scrape], source: str) -> Tuned:
    """With the pace of a server without a drafter, from its scrapes."""
    engine, stretch, notes = last_stretch(others, source)
    plain = paces(engine, stretch)
    if engine != found.engine or any(pace.tokens_per_step > 1.001 for pace in plain.values()):
        raise InvalidInput(
            f"`plain` must be of {found.engine} without a drafter, but {source} is of another or drafts."
        )
    both = [size for size in found.paces if size in plain]
    ratio = over_plain([found.paces[size] for size in both], [plain[size] for size in both]) if both else None
    return replace(found, plain=plain, over_plain=ratio, unknown=(*found.unknown, *notes))


def _counted(run: RunDirectory, found: Tuned, drafter: str | None) -> Tuned:
    """With the calibration of what the drafts counted, where they count by position."""
    files = [run.path / BEFORE, run.path / AFTER]
    if files[0].read_bytes() == files[1].read_bytes():
        raise InvalidInput(
            "The server must serve while it is watched, but counted nothing: watch it under its load, or `drive`."
        )
    if "spec_" not in files[1].read_text("utf-8"):
        return replace(
            found, unknown=(*found.unknown, "No drafts are counted: the server speculates without counting, or not.")
        )
    try:
        calibration = import_file(run, files, drafter=drafter, overwrite=True)
    except TreeoptError as error:
        return replace(found, unknown=(*found.unknown, f"Acceptance by position is not known. {first_line(error)}."))
    return replace(found, calibration=calibration, unknown=(*found.unknown, *calibration.meta["notes"]))


def _planned(run: RunDirectory, found: Tuned) -> Tuned:
    """With the plan, the report and the files for the engine, where plain's steps are known at some batch size."""
    both, calibration = [size for size in found.paces if size in found.plain], found.calibration
    if calibration is None:
        return found
    if not both:
        lacks = "Whether speculation pays is not known: plain's steps are not. Serve without the drafter under this load, run "
        return replace(
            found, unknown=(*found.unknown, f"{lacks}treeopt tune there, and pass its {SCRAPES} with `plain`.")
        )
    length = calibration.num_heads
    points = tuple(_timing(found.paces[size], length + 1) for size in both)
    plain = tuple(_timing(found.plain[size], 1) for size in both)
    info = {"measures": "step", "provenance": provenance(model=found.model) | {"machine": None, "versions": None}}
    profile = LatencyProfile(
        points, plain, Runtime(name=found.engine), info | {"inputs": inputs_of(run.path / SCRAPES)}
    )
    profile.save(run.profile)
    search(run, engine=found.engine, batch_sizes=both, measured_only=True)
    unknown = [
        f"Steps are timed with {length} guesses and with none: the plan has no length between, whose step is not known."
    ]
    command = None
    try:
        command = export(run, found.engine)[1].command
    except TreeoptError as error:
        unknown.append(f"No launch options were written. {first_line(error, 400)}.")
    note(f"The report is {write_report(run)}.")
    return replace(found, command=command, unknown=(*found.unknown, *unknown))


def _timing(pace: Pace, size: int) -> StepTiming:
    samples = tuple((1000 * pace.blocks[:, 2] / pace.blocks[:, 1]).tolist())
    return StepTiming(pace.batch_size, UNKNOWN_CONTEXT, size=size, depth=size - 1, step_ms=samples)
