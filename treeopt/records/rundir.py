"""The run directory: where commands find what earlier ones wrote."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from treeopt.errors import InvalidInput
from treeopt.files.shell import command_line
from treeopt.files.writing import replace_together, sole_writer
from treeopt.records.benchmark import Benchmark
from treeopt.records.calibration import Calibration
from treeopt.records.plan import Plan
from treeopt.records.probe import Probe
from treeopt.records.profile import LatencyProfile
from treeopt.records.requestlog import RequestLog
from treeopt.records.trace import RankTrace

T = TypeVar("T")
ENGINES = {  # other runtimes that decode here, and what opens them in `treeopt.runtime.engines`
    "transformers": "transformers:Transformers",
    "openvino": "openvino:in_fp32",
    "openvino-int8": "openvino:in_int8",
    "openvino-default": "openvino:in_own",
    "openvino-int8-default": "openvino:in_int8_own",
    "vllm": "vllm:Vllm",
}
LAUNCHED = "launched"  # stands for the servers that a user's command started
DECODERS = (*ENGINES, LAUNCHED)  # of benchmarks beside treeopt's own
BENCH = re.compile(rf"bench(?:-({'|'.join(DECODERS)}))?(?:-batch-size-(\d+))?", re.ASCII)
MAKERS = {  # of other names than their files
    "trace": "calibrate", "probe": "calibrate", "calibration": "calibrate", "plan": "search", "drafters": "run",
}  # fmt: skip


def maker(name: str) -> list[str]:
    """The words of the command that writes a file or a journal of a run, by its name.

    >>> maker("plan.json"), maker("bench-batch-size-4.json"), maker("bench-openvino.partial")
    (['search'], ['bench', '--batch-size', '4'], ['bench', '--engine', 'openvino'])
    """
    stem = name.split(".")[0]
    if found := BENCH.fullmatch(stem):
        engine, size = found.groups()
        told = ["--launch", "COMMAND"] if engine == LAUNCHED else ["--engine", engine] if engine else []
        return ["bench", *(["--batch-size", size] if size else []), *told]
    return ["calibrate", "--from-logs", "FILE"] if stem == "requests" else [MAKERS.get(stem, stem)]


class RunDirectory:
    """The files of one run, under fixed names; each is made by the command named beside it.

    >>> RunDirectory("my-run").trace.name
    'trace.npz'
    """

    def __init__(self, path: str | Path) -> None:
        if path == "":
            raise InvalidInput("A run directory must have a name, but it is empty; . is the current folder.")
        self.path = Path(path)
        self.trace = self.path / "trace.npz"  # calibrate
        self.calibration = self.path / "calibration.json"  # calibrate
        self.probe = self.path / "probe.npz"  # calibrate, under typical acceptance
        self.requests = self.path / "requests.npz"  # calibrate --from-logs
        self.profile = self.path / "profile.json"  # profile
        self.plan = self.path / "plan.json"  # search
        self.bench = self.path / "bench.json"  # bench
        self.export = self.path / "export"  # export
        self.figures = self.path / "figures"  # plot
        self.report = self.path / "report.html"  # report
        self._is_writing = False
        self.is_held = False  # whether it is gone when it was used

    @classmethod
    def of(cls, path: str | Path | RunDirectory) -> RunDirectory:
        return path if isinstance(path, RunDirectory) else cls(path)

    @classmethod
    @contextmanager
    def holding(cls, *records: Any) -> Iterator[RunDirectory]:
        """A directory that holds these results as long as it is used."""
        with TemporaryDirectory(prefix="treeopt-") as folder:
            run = cls(folder)
            run.is_held = True
            files = {RankTrace: run.trace, Probe: run.probe, Calibration: run.calibration}
            files |= {RequestLog: run.requests, LatencyProfile: run.profile, Plan: run.plan, Benchmark: run.bench}
            for record in records:
                if type(record) not in files:
                    raise TypeError(f"a result of treeopt is wanted, but this is a {type(record).__name__}")
                record.save(files[type(record)])
            yield run

    def bench_of(self, batch_size: int, engine: str | None = None) -> Path:
        """The benchmark of one batch size, where the plan has several."""
        return self.bench.with_name(f"{self.bench_in(engine).stem}-batch-size-{batch_size}.json")

    def bench_in(self, engine: str | None) -> Path:
        """The last benchmark that another runtime decoded, or treeopt itself."""
        return self.bench.with_name(f"bench-{engine}.json") if engine else self.bench

    def replace_bench(self, result: Benchmark, plan: Plan, batch_size: int, engine: str | None = None) -> None:
        """Keep a benchmark as the last one, and where the plan has several batch sizes as that of its own too."""
        files = [self.bench_in(engine), *([self.bench_of(batch_size, engine)] if len(plan.entries) > 1 else [])]
        replace_together(dict.fromkeys(files, result.save))

    def engine_benches(self) -> list[Path]:
        """All that other runtimes decoded: one for each batch size, or the last one where the plan has a single one."""
        found: list[Path] = []
        for last in map(self.bench_in, DECODERS):
            found += [file for file in self.benches() if file.stem.startswith(f"{last.stem}-batch-size-")] or [last]
        return [file for file in found if file.exists()]

    def benches(self) -> list[Path]:
        """All benchmarks that there are; a copy under a name of its own is none."""
        return [file for file in sorted(self.path.glob("bench*.json")) if maker(file.name)[0] == "bench"]

    def command(self, *words: object) -> str:
        """A command of treeopt on this run, as a shell reads it.

        >>> RunDirectory("my run").command("profile", "--batch-size", 8)
        "treeopt profile --batch-size 8 --run 'my run'"
        """
        return command_line("treeopt", *words, *(() if self.is_held else ("--run", self.path)))

    def partial(self, name: str) -> Path:
        """The journal of a measurement that is not finished."""
        return self.path / f"{name}.partial"

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be the only writer; within it the same object may be asked again. InvalidInput where another process writes."""
        if self._is_writing:
            yield
            return
        refusal = (
            f"A run directory has one writer at a time, but another treeopt is writing to {self.path}: wait for it, or "
            "pass another `run`."
        )
        folders = chain((self.path, self.figures), self.export.glob("**"), self.path.glob("*.partial/**"))
        with sole_writer(self.path, folders, refusal):
            self._is_writing = True
            try:
                yield
            finally:
                self._is_writing = False

    def replace_accuracies(
        self, calibration: Calibration, trace: RankTrace | None = None, probe: Probe | None = None
    ) -> None:
        """Replace what was measured before; those that are not given are deleted. Whenever this is killed, and on a full disk,
        the files that are there are of one origin.
        """
        records = {self.calibration: calibration, self.probe: probe, self.trace: trace}
        old = [self.requests, self.probe, self.calibration if trace is not None else self.trace]
        replace_together({file: record.save for file, record in records.items() if record is not None}, old)

    def replace_requests(self, log: RequestLog) -> None:
        replace_together({self.requests: log.save}, [self.calibration, self.probe, self.trace])

    def accuracies(self) -> list[Path]:
        return [file for file in (self.trace, self.probe, self.calibration, self.requests) if file.exists()]

    def read_trace(self) -> RankTrace:
        return _read(self.trace, RankTrace.load, self.command("calibrate"))

    def read_probe(self) -> Probe:
        return _read(self.probe, Probe.load, self.command("calibrate", "--acceptance", "typical"))

    def read_calibration(self) -> Calibration:
        return _read(self.calibration, Calibration.load, self.command("calibrate"))

    def read_requests(self) -> RequestLog:
        return _read(self.requests, RequestLog.load, self.command(*maker(self.requests.name)))

    def read_profile(self) -> LatencyProfile:
        profile = _read(self.profile, LatencyProfile.load, self.command("profile"))
        if self.calibration.exists() and any(point.depth_assumed for point in profile.points):
            profile = profile.as_deep_as(self.read_calibration().num_heads)
        return profile

    def read_plan(self) -> Plan:
        return _read(self.plan, Plan.load, self.command("search"))


def _read(path: Path, load: Callable[[Path], T], command: str) -> T:
    if not path.exists():
        raise InvalidInput(f"{path} does not exist yet. Make it with: {command}")
    return load(path)
