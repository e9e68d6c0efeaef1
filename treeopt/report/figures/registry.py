"""Every figure by name: what it shows, which files it needs, and how it is made of a run directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from treeopt.errors import InvalidInput, OutOfRange, meant
from treeopt.files.writing import atomic_writer
from treeopt.growth.probed import COVERAGE
from treeopt.growth.source import source_of
from treeopt.records.benchmark import Benchmark
from treeopt.records.calibration import Calibration
from treeopt.records.inputs import Accuracies, read_grown_on, read_timed, timed_elsewhere
from treeopt.records.plan import Plan
from treeopt.records.profile import LatencyProfile
from treeopt.records.rundir import RunDirectory, maker
from treeopt.records.stale import changed
from treeopt.records.trace import RankTrace
from treeopt.report.figures import style
from treeopt.report.figures.accuracy import accuracy_chart, groups_chart
from treeopt.report.figures.bench import accepted_chart, contenders_chart
from treeopt.report.figures.chart import Chart
from treeopt.report.figures.chart import draw as draw_chart
from treeopt.report.figures.planning import latency_chart, sizes_chart, throughput_chart
from treeopt.report.figures.tree import TreeData, draw_tree, tree_data
from treeopt.trees.shapes import Limits

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

T = TypeVar("T")


class Inputs:
    """The files of a run, each read once; OutOfRange names the command that makes a missing one."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self._benches: dict[int | None, Benchmark] = {}

    def _read(self, file: Path, read: Callable[[], T], *command: object) -> T:
        if not file.exists():
            raise OutOfRange(f"{file} does not exist yet. Make it with: {self.run.command(*command)}")
        return read()

    @cached_property
    def trace(self) -> RankTrace:
        return self._read(self.run.trace, self.run.read_trace, "calibrate")

    @cached_property
    def profile(self) -> LatencyProfile:
        return self._read(self.run.profile, self.run.read_profile, "profile")

    @cached_property
    def plan(self) -> Plan:
        return self._read(self.run.plan, self.run.read_plan, "search")

    @cached_property
    def calibration(self) -> Calibration:
        """The run's own, else the one that its plan was made from."""
        if not self.run.calibration.exists():
            if self.run.trace.exists():
                return Calibration.from_trace(self.trace)
            if self.run.plan.exists() and (found := source_of(self.source).calibration):
                return found
        return self._read(self.run.calibration, self.run.read_calibration, "calibrate")

    @cached_property
    def grown_on(self) -> Accuracies | None:
        """What the plan was made from: a file of the run or a shipped one, unless it has changed since."""
        return read_grown_on(self.run, self.plan.inputs)

    @cached_property
    def source(self) -> Accuracies:
        """What the plan was made from, if it is at hand; else the run's own trace or calibration."""
        if self.grown_on is not None:
            return self.grown_on
        if self.plan.objective == COVERAGE:
            raise OutOfRange(f"The plan was made from another probe than the one in {self.run.path}: search again.")
        if self.run.trace.exists():
            return self.trace
        if self.run.calibration.exists():
            return self.run.read_calibration()
        names = ", ".join(self.plan.inputs) or "files that it does not name"
        raise OutOfRange(
            f"The plan was made from {names}, not in {self.run.path}. Run: {self.run.command('calibrate')}"
        )

    @cached_property
    def timed(self) -> LatencyProfile | None:
        """The profile that the plan was made from, if it is at hand."""
        return read_timed(self.run, self.plan.inputs)

    def elsewhere(self, bench: Benchmark) -> str:
        """In what the plan's latencies and a benchmark differ (`timed_elsewhere`)."""
        return timed_elsewhere(self.plan, self.timed, bench)

    def bench(self, batch_size: int | None) -> Benchmark:
        """The benchmark of a batch size (the last one made, if None)."""
        if batch_size not in self._benches:
            own = self.run.bench if batch_size is None else self.run.bench_of(batch_size)
            file, command = own if own.exists() else self.run.bench, maker(own.name)
            found = self._read(file, lambda: Benchmark.load(file), *command)
            if file == self.run.bench and batch_size not in (None, found.contenders[0].batch_size):
                raise OutOfRange(
                    f"{file} is not of batch size {batch_size}. Measure it with: {self.run.command(*command)}"
                )
            self._benches[batch_size] = found
        return self._benches[batch_size]

    def benches(self) -> dict[int, Benchmark]:
        """Batch size -> its benchmark, of this plan as it is now, decoded where the latencies were timed."""
        found = {}
        for size in (entry.batch_size for entry in self.plan.entries):
            with suppress(OutOfRange):
                bench = self.bench(size)
                if not changed(self.run, bench.inputs or {}) and not self.elsewhere(bench):
                    found[size] = bench
        return found


@dataclass(frozen=True)
class FigureKind:
    """A kind of picture.

    needs   : files of the run directory; "a or b" where either will do
    compute : reads and computes what is drawn; OutOfRange where the files do not hold it
    """

    name: str
    caption: str
    needs: tuple[str, ...]
    compute: Callable[[Inputs, int | None], Chart | TreeData]
    per_batch_size: bool = False


@dataclass(frozen=True, eq=False)
class Picture:
    """A figure that was drawn, and the data of it; ``stem`` is the name of its files."""

    figure: FigureKind
    stem: str
    batch_size: int | None
    data: Chart | TreeData
    drawing: Drawing

    @cached_property
    def svg(self) -> bytes:
        return style.to_bytes(self.drawing, "svg")


def _groups(inputs: Inputs) -> Chart:
    info = inputs.calibration.meta
    if info.get("groups"):
        return groups_chart(info["groups"], info)
    raise OutOfRange("The calibration's prompts are not grouped. Calibrate on prompts with groups.")


def _sizes(inputs: Inputs) -> Chart:
    plan = inputs.plan if inputs.run.plan.exists() else None
    record = inputs.source if plan and plan.objective == COVERAGE else inputs.trace
    return sizes_chart(record, plan.limits(Limits()) if plan else Limits())


_MEASURED = ("trace.npz or calibration.json",)
FIGURES: dict[str, FigureKind] = {
    kind.name: kind
    for kind in (
        FigureKind("tree", "The chosen tree, its nodes shaded by how often they are accepted", ("plan.json", *_MEASURED),
                   lambda i, b: tree_data(i.plan.entry(b).tree, i.source, in_sample=i.grown_on is not None), True),
        FigureKind("accuracy", "Accuracy at each depth by rank, single and cumulative", _MEASURED,
                   lambda i, b: accuracy_chart(i.calibration)),
        FigureKind("groups", "Top-1 accuracy at each depth by group of prompts", _MEASURED,
                   lambda i, b: _groups(i)),
        FigureKind("sizes", "Tokens per step over tree size: grown trees against chains",
                   ("trace.npz or probe.npz",),
                   lambda i, b: _sizes(i)),
        FigureKind("latency", "Latency of a step over tree size, in ms and over a plain step", ("profile.json",),
                   lambda i, b: latency_chart(i.profile)),
        FigureKind("throughput", "Predicted throughput over tree size, the chosen trees starred", ("plan.json",),
                   lambda i, b: throughput_chart(i.plan)),
        FigureKind("accepted", "Accepted guesses per step: predicted, replayed, measured", ("bench.json",),
                   lambda i, b: accepted_chart(i.bench(b)), True),
        FigureKind("contenders", "Speedups and tokens per step of all contenders", ("bench.json",),
                   lambda i, b: contenders_chart(i.bench(b)), True),
    )
}  # fmt: skip


def pictures(
    run: RunDirectory, *, names: Sequence[str] | None = None, batch_size: int | None = None
) -> Iterator[Picture | str]:
    """Draw the named figures (all that a run measured, if None), one after the other.

    Yields a picture, or a sentence on one that was left out: why, and which command makes its input. Of a run whose figures
    are from elsewhere only pictures that were asked for are missed.
    Raises InvalidInput for a name that is not in `FIGURES`.
    """
    wanted = FIGURES if names is None else names
    for name in wanted:
        if name not in FIGURES:
            raise InvalidInput(f"A figure must be one of {', '.join(FIGURES)}, but got {name!r}.{meant(name, FIGURES)}")
    inputs = Inputs(run)
    planned = [entry.batch_size for entry in inputs.plan.entries] if run.plan.exists() else [None]
    sizes = planned if batch_size is None else [batch_size]
    for figure in (FIGURES[name] for name in wanted):
        for size in sizes if figure.per_batch_size else [None]:
            stem = f"{figure.name}-batch-size-{size}" if size is not None and len(planned) > 1 else figure.name
            try:
                data = figure.compute(inputs, size)
                drawing = draw_tree(data) if isinstance(data, TreeData) else draw_chart(data)
                yield Picture(figure, stem, size, data, drawing)
            except OutOfRange as reason:
                if names is not None or run.can_decode:
                    yield f"{stem} was left out: {reason}"


def draw(
    run: RunDirectory,
    *,
    names: Sequence[str] | None = None,
    formats: Sequence[str] = style.FORMATS,
    batch_size: int | None = None,
    drawn: Iterable[Picture | str] | None = None,
) -> tuple[list[Path], list[str]]:
    """Write figures/NAME.png and .svg of everything that the run has the files for: (files, notes).

    A figure of the plan's tree or of a benchmark is made for each batch size, as NAME-batch-size-4.png, where the plan
    has several. Notes tell what was left out and why. Pictures that are ``drawn`` are not drawn again.
    """
    for kind in formats:
        if kind not in style.FORMATS:
            raise InvalidInput(f"--format must be one of {', '.join(style.FORMATS)}, but got {kind!r}.")
    files, notes = [], []
    for picture in pictures(run, names=names, batch_size=batch_size) if drawn is None else drawn:
        if isinstance(picture, str):
            notes.append(picture)
            continue
        for kind in formats:
            files.append(run.figures / f"{picture.stem}.{kind}")
            with atomic_writer(files[-1]) as stream:
                stream.write(picture.svg if kind == "svg" else style.to_bytes(picture.drawing, kind))
    return files, notes
