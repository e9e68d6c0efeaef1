"""What a run directory holds: what each file is of, whether it is still true, and what to do next."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeopt.errors import TreeoptError
from treeopt.files.shell import command_line
from treeopt.records.benchmark import Benchmark
from treeopt.records.calibration import Calibration
from treeopt.records.inputs import changed
from treeopt.records.origins import Provenance
from treeopt.records.plan import Plan
from treeopt.records.probe import Probe
from treeopt.records.profile import LatencyProfile
from treeopt.records.requestlog import RequestLog
from treeopt.records.rules import option_of, rule_of
from treeopt.records.rundir import DECODERS, ENGINES, RunDirectory, maker
from treeopt.records.trace import RankTrace
from treeopt.report.wording import count

Records = dict[str, Any]  # file name -> what was read from it
Told = tuple[Mapping[str, Any], str]  # what a file says of its making, and what it holds
OK, STALE, DAMAGED, UNFINISHED = "up to date", "stale", "damaged", "unfinished"


@dataclass(frozen=True, kw_only=True)
class FileStatus:
    """A file or folder of a run: when and by which command it was made, what it holds, of what, its state and why."""

    name: str
    made: str | None = None
    command: str | None = None
    holds: str = ""
    of: str = ""
    state: str = OK
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The files of a run in the order of the line, and what to do next: why, and the command; None if nothing is."""

    run: str
    files: list[FileStatus]
    why: str
    next: str | None


def status(run: RunDirectory) -> RunStatus:
    """Read everything that a run directory has; a file that cannot be read gets a row that says so."""
    found: Records = {}
    rows = [*_results(run, found), *_folders(run), *_journals(run)]
    why, words = _next(run, {row.name: row for row in rows}, found)
    command = command_line("treeopt", *words, "--run", run.path) if words else None
    return RunStatus(run=str(run.path), files=rows, why=why, next=command)


def _results(run: RunDirectory, found: Records) -> Iterator[FileStatus]:
    """A row for every file that a command wrote; ``found`` gets what they hold."""
    kinds: list[tuple[Path, Callable[[Path], Any], Callable[[Any], Told]]] = [
        (run.calibration, Calibration.load, lambda c: (c.meta, f"accuracies of {c.num_heads} heads")),
        (run.trace, RankTrace.load, _trace),
        (run.probe, Probe.load, lambda probe: (probe.meta, f"{count(len(probe.accepted), 'step')} of a tree")),
        (run.requests, RequestLog.load, lambda log: (log.meta, count(log.num_sequences, "request"))),
        (run.profile, LatencyProfile.load, lambda p: (p.info, _timed(p))),
        (run.plan, Plan.load, _plan),
        *((file, Benchmark.load, _bench) for file in run.benches()),
    ]
    calibrated = Provenance()  # when and by which command, which a trace does not say itself
    for file, load, tell in kinds:
        if not file.exists():
            continue
        made, command = _written(file), None
        try:
            record = found[file.name] = load(file)
            info, holds = tell(record)
        except (TreeoptError, OSError) as error:
            yield FileStatus(name=file.name, made=made, state=DAMAGED, why=str(error))
            continue
        origin = Provenance.of(info)
        calibrated = origin if calibrated == Provenance() else calibrated
        if file != run.plan:
            made = origin.time or calibrated.time or made
            command = origin.command or calibrated.command
        age = _age(changed(run, getattr(record, "inputs", None) or {}, or_gone=True))
        yield FileStatus(name=file.name, made=made, command=command, holds=holds, of=_origin(origin), **age)


def _folders(run: RunDirectory) -> Iterator[FileStatus]:
    """A row for everything that is made from results; stale where one of these is younger."""
    results = [run.trace, run.probe, run.calibration, run.profile, run.plan, *run.benches()]
    ages = {file: file.stat().st_mtime for file in results if file.exists()}
    engines = sorted(run.export.iterdir()) if run.export.is_dir() else []
    exports = [(path, [run.plan]) for path in engines]
    for path, what in [*exports, (run.figures, results), (run.report, results)]:
        files = [file for file in (path, *path.rglob("*")) if file.is_file()]
        if files:
            made = min(file.stat().st_mtime for file in files)
            age = _age([file.name for file in what if ages.get(file, 0) > made])
            holds, name = count(len(files), "file") if path.is_dir() else "", str(path.relative_to(run.path))
            yield FileStatus(name=name, made=_written(path), holds=holds, **age)


def _age(changed: Sequence[str]) -> dict[str, str]:
    """State of what was made from files, some of which changed since."""
    return {"state": STALE, "why": f"{', '.join(changed)} changed since"} if changed else {}


def _journals(run: RunDirectory) -> Iterator[FileStatus]:
    for folder in sorted(run.path.glob("*.partial")):
        blocks = [file for file in folder.rglob("*") if file.is_file() and file.stem.isdecimal()]
        why = f"stopped after {count(len(blocks), 'block')}"
        yield FileStatus(name=folder.name, made=_written(folder), state=UNFINISHED, why=why)


def _next(run: RunDirectory, rows: Mapping[str, FileStatus], found: Records) -> tuple[str, list[str]]:
    """Why, and the words of the command; none where nothing is to be done."""
    for row in rows.values():
        if row.state == DAMAGED:
            return f"{row.name} cannot be read. Delete it, and make it again.", maker(row.name)
    measured = ("calibrate", "probe", "profile", "bench", *(run.bench_in(e).stem for e in DECODERS))
    for name in ("drafters", "run", *measured):
        if f"{name}.partial" in rows:
            words = maker(name)
            return f"{' '.join(words)} was stopped. The same command, with the same options, continues.", words

    def wanting(name: str) -> str:
        """Why a file is to be made; empty where it is up to date."""
        if name not in rows:
            return f"There is no {name} yet."
        return f"{name} is stale: {rows[name].why}." if rows[name].state == STALE else ""

    plan = found.get(run.plan.name)
    if run.requests.name in found and (why := wanting(run.plan.name)):
        return why, ["search", "--for", "ENGINE"]
    decodes = run.trace.name in found and bool(found[run.trace.name].meta.get("source"))
    used = plan.inputs if plan else {}  # shipped files are not the run's, and never wanting
    accuracies = {run.trace.name, run.probe.name, run.calibration.name}
    if not {run.calibration.name, run.requests.name} & found.keys() and (plan is None or accuracies & used.keys()):
        return "Nothing is calibrated yet.", ["calibrate"]
    timed = plan is not None and run.profile.name not in used and plan.entries[0].chosen.step_ms is not None
    if not timed and (why := wanting(run.profile.name)):
        profile = found.get(run.profile.name)
        engine = profile.runtime.get("name") if profile else None
        own = ["profile", *(["--engine", engine] if engine in ENGINES else [])]
        return why, own if decodes else ["profile", "--from-csv", "FILE"]
    if plan is None or wanting(run.plan.name):
        return wanting(run.plan.name), ["search"]
    benches = [run.bench_of(entry.batch_size) for entry in plan.entries] if len(plan.entries) > 1 else [run.bench]
    for file in [*benches, *run.engine_benches()] if decodes else ():
        if why := wanting(file.name):
            return why, maker(file.name)
    exports = [name for name in rows if name.startswith(f"{run.export.name}/")]
    old = [name for name in exports if rows[name].state == STALE]
    if plan.speculates and old:
        return wanting(old[0]), ["export", "--to", old[0].split("/")[1]]
    if plan.speculates and not exports:
        engine = plan.constraint.engine if plan.constraint else None
        return "Nothing is exported yet.", ["export", "--to", engine.name if engine else "ENGINE"]
    why = wanting(run.report.name)
    return (why, ["report"]) if why else ("Everything is up to date.", [])


def _trace(trace: RankTrace) -> Told:
    return trace.meta, f"{count(trace.num_sequences, 'answer')}, {count(len(trace.ranks), 'state')}"


def _timed(profile: LatencyProfile) -> str:
    runtime = profile.runtime.get("name")
    return f"batch sizes {_numbers(profile.batch_sizes)}" + (f"; runtime {runtime}" if runtime else "")


def _plan(plan: Plan) -> Told:
    trees = ", ".join(f"{e.chosen.size} rows" if e.speculates else "do not speculate" for e in plan.entries)
    engine = plan.constraint.engine if plan.constraint else None
    sizes = _numbers([entry.batch_size for entry in plan.entries])
    return {}, f"batch sizes {sizes}: {trees}" + (f"; for {engine.name}" if engine else "")


def _bench(bench: Benchmark) -> Told:
    first = bench.contenders[0]
    by = f"; by {bench.engine}" if bench.engine else ""
    return {"provenance": bench.provenance}, f"batch size {first.batch_size}: {count(first.compared, 'answer')}{by}"


def _origin(origin: Provenance) -> str:
    """Model, drafter, data, number format and machine, as far as they are known."""
    drafter, rule = origin.drafter or {}, origin.acceptance
    kind = drafter.get("id") or drafter.get("kind")
    accepts = option_of(rule) if rule and rule_of(rule) != "greedy" else None
    known = [origin.model, kind, origin.dataset, accepts, origin.dtype, origin.device, origin.machine]
    return ", ".join(filter(None, known))


def _numbers(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _written(file: Path) -> str:
    """When a file was last written, as provenance has times."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(file.stat().st_mtime))
