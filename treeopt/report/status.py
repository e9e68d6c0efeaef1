"""What a run directory holds: what each file is of, whether it is still true, and what to do next."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeopt.arms.arm import Arms
from treeopt.engines.plans import first_taking
from treeopt.engines.registry import engine_of, runners
from treeopt.errors import TreeoptError
from treeopt.files.places import shipped
from treeopt.files.shell import command_line, shell_word
from treeopt.records.benchmark import Benchmark
from treeopt.records.calibration import Calibration
from treeopt.records.origins import Provenance
from treeopt.records.plan import Plan
from treeopt.records.probe import Probe
from treeopt.records.profile import LatencyProfile
from treeopt.records.requestlog import RequestLog
from treeopt.records.rules import option_of, rule_of
from treeopt.records.rundir import DECODERS, ENGINES, LAUNCHABLE, RunDirectory, maker
from treeopt.records.stale import changed
from treeopt.records.trace import RankTrace
from treeopt.report.verdict import slowdown
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
    steps = Steps(run, {row.name: row for row in rows}, found)
    later = f"treeopt compare {shell_word(str(run.path))} LATER_RUN"
    why, command = next(
        iter(steps), (f"Everything is up to date. Whether it still is for later traffic: {later}", None)
    )
    return RunStatus(run=str(run.path), files=rows, why=why, next=command)


def _results(run: RunDirectory, found: Records) -> Iterator[FileStatus]:
    """A row for every file that a command wrote; ``found`` gets what they hold."""
    kinds: list[tuple[Path, Callable[[Path], Any], Callable[[Any], Told]]] = [
        (run.calibration, Calibration.load, lambda c: (c.meta, f"accuracies of {c.num_heads} heads")),
        (run.trace, RankTrace.load, _trace),
        (run.probe, Probe.load, lambda probe: (probe.meta, f"{count(len(probe.accepted), 'step')} of a tree")),
        (run.requests, RequestLog.load, lambda log: (log.meta, count(log.num_sequences, "request"))),
        (run.arms, Arms.load, lambda arms: ({}, count(len(arms.arms), "setting"))),
        (run.profile, LatencyProfile.load, lambda p: (p.info, _timed(p))),
        (run.plan, Plan.load, _plan),
        *((file, Benchmark.load, _bench) for file in run.benches()),
    ]
    for file, load, tell in kinds:
        if not file.exists():
            continue
        made = _written(file)
        try:
            record = found[file.name] = load(file)
            info, holds = tell(record)
        except (TreeoptError, OSError) as error:
            yield FileStatus(name=file.name, made=made, state=DAMAGED, why=str(error))
            continue
        origin = Provenance.of(info)
        if file != run.plan:
            made = origin.time or made
        age = _age(changed(run, getattr(record, "inputs", None) or {}, or_gone=True))
        yield FileStatus(name=file.name, made=made, command=origin.command, holds=holds, of=_origin(origin), **age)


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


@dataclass(frozen=True)
class Steps:
    """What is to be done in a run, each step with why and its command; only what the run's kind needs is there.

    rows    : file name to its row
    records : file name to what was read from it
    """

    run: RunDirectory
    rows: Mapping[str, FileStatus]
    records: Records

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """All steps, the next one first."""
        run, records = self.run, self.records
        for row in self.rows.values():
            if row.state == DAMAGED:
                yield f"{row.name} cannot be read. Delete it, and make it again.", run.command(*maker(row.name))
        measured = ("calibrate", "probe", "profile", "bench", *(run.bench_in(engine).stem for engine in DECODERS))
        for name in ("drafters", "run", *measured):
            if f"{name}.partial" in self.rows:
                words = maker(name)
                why = f"{' '.join(words)} was stopped. The same command, with the same options, continues."
                yield why, run.command(*words)
        plan, trace = records.get(run.plan.name), records.get(run.trace.name)
        accuracies = {file.name for file in (run.trace, run.probe, run.calibration)}
        if trace is not None and (shard := trace.meta.get("shard")):
            others = [f"SHARD-{n}" for n in range(1, shard["count"] + 1) if n != shard["index"]]
            why = (
                f"It holds shard {shard['index']} of {shard['count']} of a calibration. They are joined in another run."
            )
            yield why, command_line("treeopt", "import", run.path, *others, "--run", "WHOLE")
        elif run.requests.name in records:
            yield from self.planned("search", "--for", self.engine)
        elif plan is not None and not accuracies & {*plan.inputs, *records}:  # from shipped figures
            names = [name for name, file in shipped("calibration").items() if file.name in plan.inputs]
            yield from self.planned("search", "--calibration", *(names or ["NAME"]))
        elif plan is None and run.arms.name in records and not accuracies & records.keys():
            yield "It holds settings that were run. The decision among them is printed.", run.command("tune")
        elif run.calibration.name not in records:
            yield "Nothing is calibrated yet.", run.command("calibrate")
        else:
            yield from self.timed()
            yield from self.planned("search")

    @property
    def decodes(self) -> bool:
        """Whether the run's model can be decoded here again."""
        trace = self.records.get(self.run.trace.name)
        return trace is not None and trace.meta.get("source") is not None

    @property
    def engine(self) -> str:
        """The engine that the plan is for, or that was timed; ENGINE where neither is known."""
        plan, profile = (self.records.get(file.name) for file in (self.run.plan, self.run.profile))
        if plan is not None and plan.constraint and plan.constraint.engine:
            return str(plan.constraint.engine.name)
        return (profile and engine_of(profile.runtime.get("name") or "")) or "ENGINE"

    def made(self, name: str, *words: str) -> Iterator[tuple[str, str]]:
        """The step that makes a file, where it is missing or stale."""
        if name not in self.rows:
            yield f"There is no {name} yet.", self.run.command(*words)
        elif self.rows[name].state == STALE:
            yield f"{name} is stale: {self.rows[name].why}.", self.run.command(*words)

    def timed(self) -> Iterator[tuple[str, str]]:
        """The step that makes a profile; a plan that was made without one stays, unless it can be timed here."""
        name = self.run.profile.name
        plan, profile = self.records.get(self.run.plan.name), self.records.get(name)
        is_timed = plan is not None and plan.entries[0].chosen.step_ms is not None
        if plan is not None and name not in plan.inputs and (is_timed or not self.decodes):
            return
        engine = profile.runtime.get("name") if profile else None
        here = ["profile", *(["--engine", engine] if engine in ENGINES else [])]
        yield from self.made(name, *(here if self.decodes else ("profile", "--from-csv", "FILE")))

    def planned(self, *search: str) -> Iterator[tuple[str, str]]:
        """The steps from the plan on."""
        run, plan = self.run, self.records.get(self.run.plan.name)
        yield from self.made(run.plan.name, *search)
        if plan is None:
            return
        benches = [run.bench_of(entry.batch_size) for entry in plan.entries] if len(plan.entries) > 1 else [run.bench]
        for file in [*(benches if self.decodes else ()), *run.engine_benches()]:
            yield from self.made(file.name, *maker(file.name))
        engine = _first_taking(plan)
        exports = [name for name in self.rows if name.startswith(f"{run.export.name}/")]
        measured = [self.records.get(file.name) for file in benches]
        if plan.speculates and not any(slowdown(bench) for bench in measured if bench is not None):
            for name in exports or ([f"{run.export.name}/{engine}"] if engine else []):
                yield from self.made(name, "export", "--to", name.split("/")[1])
            if engine in LAUNCHABLE and not self.decodes and plan.constraint and not run.engine_benches():
                yield "The plan was not tried yet.", run.command("bench", "--launch", "COMMAND")
        yield from self.made(run.report.name, "report")


def _first_taking(plan: Plan) -> str | None:
    """The engine that the plan is for, or else the first, that takes it as it is; None where none does.

    ENGINE where neither an engine nor the drafter is known.
    """
    planned, kind = plan.constraint and plan.constraint.engine, (plan.drafter or {}).get("kind")
    if planned is None and kind is None:
        return "ENGINE"
    taken = first_taking(plan, [planned.name] if planned else runners(kind))
    return taken[0] if taken else None


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
