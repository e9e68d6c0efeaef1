"""What results look like where they are printed and in a notebook: tables as text and HTML, pictures as figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.segment import Segment

from treeopt.arms.gate import Gate
from treeopt.arms.tuned import TunedArms
from treeopt.engines.base import Names
from treeopt.errors import OutOfRange
from treeopt.files.shell import printable
from treeopt.growth.score import Score
from treeopt.pipeline.export import export_to
from treeopt.planning.compared import Compared, DraftersCompared, GroupsCompared
from treeopt.records.benchmark import Benchmark
from treeopt.records.calibration import Calibration
from treeopt.records.display import Exported
from treeopt.records.exchange import ExportOptions
from treeopt.records.inputs import model_and_drafter
from treeopt.records.plan import Plan
from treeopt.records.probe import Probe
from treeopt.records.profile import LatencyProfile
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.report import figures
from treeopt.report.arms_table import decision_table
from treeopt.report.bench_table import bench_table
from treeopt.report.comparison import compared_table
from treeopt.report.latency_table import profile_table
from treeopt.report.plan_table import plan_table
from treeopt.report.server_table import server_table
from treeopt.report.tables import calibration_table, score_table
from treeopt.serving.watch import Tuned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 120  # characters
STYLE = "overflow-x:auto;white-space:pre;line-height:normal;font-family:Menlo,'DejaVu Sans Mono',Consolas,monospace"


# What makes the table of a result, as the command that makes it prints it.
TABLES: dict[type, Callable[[Any], RenderableType]] = {
    Calibration: calibration_table,
    LatencyProfile: profile_table,
    Plan: plan_table,
    TunedArms: lambda tuned: decision_table(tuned.decided),
    Tuned: server_table,
    Benchmark: bench_table,
    **dict.fromkeys((Compared, GroupsCompared, DraftersCompared, Gate), compared_table),
    RankTrace: lambda trace: calibration_table(Calibration.from_trace(trace)),
    Score: lambda score: score_table(score, "the tree"),
    Probe: lambda probe: (
        f"Probe of {len(probe.accepted):,} steps of {probe.num_sequences:,} answers: what each would have accepted of a tree "
        f"of {len(probe.tree)} rows"
    ),
}


def _segments(record: Any, width: int) -> Iterator[Segment]:
    """The table of a record on lines of so many characters; no name in it moves a cursor."""
    console = Console(file=StringIO(), width=width, highlight=False, markup=False, force_jupyter=False)
    for segment in console.render(TABLES[type(record)](record)):
        yield Segment(printable(segment.text), segment.style)


def text(record: Any) -> str:
    """The table as the command prints it on 80 columns."""
    return "".join(segment.text for segment in _segments(record, 80)).rstrip()


def html(record: Any) -> str:
    """The table as an HTML element: every text escaped, whatever a file brought in; bold is all that is kept of style."""
    parts = []
    for segment in _segments(record, WIDTH):
        bold = segment.style is not None and segment.style.bold and segment.text.strip()
        parts.append(f"<b>{escape(segment.text)}</b>" if bold else escape(segment.text))
    return f'<pre style="{STYLE}">{"".join(parts)}</pre>'


def figure(records: Sequence[Any], name: str, batch_size: int | None) -> Figure:
    """The picture of that name; OutOfRange names the results that it needs."""
    with RunDirectory.holding(*records) as run:
        picture = next(figures.pictures(run, names=[name], batch_size=batch_size))
    if isinstance(picture, str):
        needs = ", ".join(figures.FIGURES[name].needs)
        raise OutOfRange(f"The figure {name} needs {needs}: pass such results too, as in plan.plot('tree', trace).")
    return picture.drawing


def write_export(plan: Plan, engine: str, folder: Path, options: ExportOptions) -> Exported:
    files, written = export_to(folder, plan, engine, options, names=Names(*model_and_drafter(plan)))
    return Exported(tuple(files), written.notes, written.command)
