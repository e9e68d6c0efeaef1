"""The run directory: the files that commands write and later ones read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from treeopt import RUN
from treeopt.errors import InvalidInput
from treeopt.files.shell import command_line
from treeopt.files.writing import replace_together, sole_writer

if TYPE_CHECKING:
    from treeopt.records.benchmark import Benchmark
    from treeopt.records.calibration import Calibration
    from treeopt.records.plan import Plan
    from treeopt.records.probe import Probe
    from treeopt.records.profile import LatencyProfile
    from treeopt.records.requestlog import RequestLog
    from treeopt.records.trace import RankTrace

T = TypeVar("T")
ENGINES = {  # other runtimes on this machine, and the functions of `treeopt.runtime.engines` that open them
    "transformers": "transformers:Transformers",
    "openvino": "openvino:in_fp32",
    "openvino-int8": "openvino:in_int8",
    "openvino-default": "openvino:in_own",
    "openvino-int8-default": "openvino:in_int8_own",
    "vllm": "vllm:Vllm",
}
STEPWISE = tuple(name for name in ENGINES if name != "transformers")  # which decode step by step
LAUNCHED = "launched"  # the servers that a user's command started
LAUNCHABLE = ("vllm", "llama-cpp")  # the engines of such servers, which count drafts by position
DECODERS = (*ENGINES, LAUNCHED)  # runtimes of benchmarks, besides treeopt's own
BENCH = re.compile(rf"bench(?:-({'|'.join(DECODERS)}))?(?:-batch-size-(\d+))?", re.ASCII)
MAKERS = {  # commands that have other names than their files
    "trace": "calibrate", "probe": "calibrate", "calibration": "calibrate", "plan": "search", "drafters": "run",
}  # fmt: skip


def maker(name: str) -> list[str]:
    """The words of the command that writes a file or a journal of a run, by its name.

    >>> maker("plan.json"), maker("bench-batch-size-4.json"), maker("bench-openvino.partial")
    (['search'], ['bench', '--batch-size', '4'], ['bench', '--engine', 'openvino'])
    """
    stem = name.split(".")[0]
    if stem == "arms":
        return ["bench", "--launch", "COMMAND", "--lengths", "0,2,4,8"]
    if stem == "requests":
        return ["requests", "FILE"]
    match = BENCH.fullmatch(stem)
    if match is None:
        return [MAKERS.get(stem, stem)]
    engine, size = match.groups()
    words = ["bench", "--batch-size", size] if size else ["bench"]
    if engine == LAUNCHED:
        return [*words, "--launch", "COMMAND"]
    return [*words, "--engine", engine] if engine else words


class RunDirectory:
    """The files of one run, under fixed names.

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
        self.requests = self.path / "requests.npz"  # requests
        self.profile = self.path / "profile.json"  # profile
        self.plan = self.path / "plan.json"  # search
        self.bench = self.path / "bench.json"  # bench
        self.export = self.path / "export"  # export
        self.figures = self.path / "figures"  # plot
        self.report = self.path / "report.html"  # report
        self.arms = self.path / "arms.json"  # import, or bench --launch --lengths
        self._is_writing = False
        self.is_held = False  # whether it is temporary: `holding`

    @classmethod
    def of(cls, path: str | Path | RunDirectory) -> RunDirectory:
        return path if isinstance(path, RunDirectory) else cls(path)

    @classmethod
    @contextmanager
    def holding(cls, *records: Any) -> Iterator[RunDirectory]:
        """A temporary directory with these results."""
        with TemporaryDirectory(prefix="treeopt-") as folder:
            run = cls(folder)
            run.is_held = True
            files = {"RankTrace": run.trace, "Probe": run.probe, "Calibration": run.calibration, "Plan": run.plan}
            files |= {"RequestLog": run.requests, "LatencyProfile": run.profile, "Benchmark": run.bench}
            for record in records:
                name = type(record).__name__
                if name not in files:
                    raise TypeError(f"a result of treeopt is needed, but this is a {name}")
                record.save(files[name])
            yield run

    def bench_of(self, batch_size: int, engine: str | None = None) -> Path:
        """The file of the last benchmark at one batch size, of a plan that has several."""
        return self.bench.with_name(f"{self.bench_in(engine).stem}-batch-size-{batch_size}.json")

    def bench_in(self, engine: str | None) -> Path:
        """The file of the last benchmark that another runtime decoded; for None, that treeopt decoded."""
        return self.bench.with_name(f"bench-{engine}.json") if engine else self.bench

    def replace_bench(self, result: Benchmark, plan: Plan, batch_size: int, engine: str | None = None) -> None:
        """Save a benchmark as the last one, and also as that of its batch size where the plan has several."""
        files = [self.bench_in(engine), *([self.bench_of(batch_size, engine)] if len(plan.entries) > 1 else [])]
        replace_together(dict.fromkeys(files, result.save))

    def engine_benches(self) -> list[Path]:
        """The benchmarks of other runtimes: those of each batch size, or else the last one."""
        files: list[Path] = []
        for last in map(self.bench_in, DECODERS):
            files += [file for file in self.benches() if file.stem.startswith(f"{last.stem}-batch-size-")] or [last]
        return [file for file in files if file.exists()]

    def benches(self) -> list[Path]:
        """All benchmarks, under the names that treeopt gives them."""
        return [file for file in sorted(self.path.glob("bench*.json")) if maker(file.name)[0] == "bench"]

    def command(self, *words: object) -> str:
        """A command of treeopt on this run, in words for a shell; that of the usual name need not be said.

        >>> RunDirectory("my run").command("profile", "--batch-size", 8)
        "treeopt profile --batch-size 8 --run 'my run'"
        """
        is_usual = self.is_held or self.path == Path(RUN)
        return command_line("treeopt", *words, *(() if is_usual else ("--run", self.path)))

    def partial(self, name: str) -> Path:
        """The folder of a journal, of a measurement that is not finished."""
        return self.path / f"{name}.partial"

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be the only writer of the directory. Raises InvalidInput where another process writes to it.

        Within the block the same object may enter it again.
        """
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
        """Replace all accuracies of the run by new ones, which are of one origin.

        Whenever the process is killed, and on a full disk, no two files are of different origin.
        """
        records = {self.calibration: calibration, self.probe: probe, self.trace: trace}
        old = [self.requests, self.probe, self.calibration if trace is not None else self.trace]
        replace_together({file: record.save for file, record in records.items() if record is not None}, old)

    def replace_requests(self, log: RequestLog) -> None:
        """Replace all accuracies of the run by a log of requests."""
        replace_together({self.requests: log.save}, [self.calibration, self.probe, self.trace])

    def accuracies(self) -> list[Path]:
        """The files of accuracies and requests that there are."""
        return [file for file in (self.trace, self.probe, self.calibration, self.requests) if file.exists()]

    @property
    def remedy(self) -> str:
        """The sentence that ends a refusal to replace a measurement of the run, or to mix one with it."""
        return f"Pass another `run`, or `overwrite`. {self.status_says}"

    @property
    def status_says(self) -> str:
        """The sentence that names `treeopt status`."""
        return f"What is there and what comes next: {self.command('status')}"

    def check_free(self, what: str, files: Iterable[Path]) -> None:
        """Raise InvalidInput where one of the files is there, which ``what`` would replace."""
        for file in filter(Path.exists, files):
            raise InvalidInput(f"{file} exists, and {what} replaces it only if it is to be overwritten. {self.remedy}")

    @property
    def can_decode(self) -> bool:
        """Whether treeopt decodes here: in an empty run, and with its own trace; not for figures from elsewhere."""
        return self.trace.exists() or not (self.accuracies() or self.plan.exists() or self.arms.exists())

    def read_trace(self) -> RankTrace:
        from treeopt.records.trace import RankTrace

        return self._read(self.trace, RankTrace.load, "calibrate")

    def read_probe(self) -> Probe:
        from treeopt.records.probe import Probe

        return self._read(self.probe, Probe.load, "calibrate", "--rule", "typical")

    def read_calibration(self) -> Calibration:
        from treeopt.records.calibration import Calibration

        return self._read(self.calibration, Calibration.load, "calibrate")

    def read_requests(self) -> RequestLog:
        from treeopt.records.requestlog import RequestLog

        return self._read(self.requests, RequestLog.load, *maker(self.requests.name))

    def read_profile(self) -> LatencyProfile:
        from treeopt.records.profile import LatencyProfile

        profile = self._read(self.profile, LatencyProfile.load, "profile")
        if self.calibration.exists() and any(point.depth_assumed for point in profile.points):
            profile = profile.as_deep_as(self.read_calibration().num_heads)
        return profile

    def read_plan(self) -> Plan:
        from treeopt.records.plan import Plan

        return self._read(self.plan, Plan.load, "search")

    def _read(self, path: Path, load: Callable[[Path], T], *words: str) -> T:
        """The result in a file. InvalidInput where it is missing names the command that makes it, or else status."""
        if path.exists():
            return load(path)
        is_made_here = self.can_decode or words == ("search",)
        hint = f"Make it with: {self.command(*words)}" if is_made_here else self.status_says
        raise InvalidInput(f"{path} does not exist yet. {hint}")
