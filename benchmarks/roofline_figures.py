"""A device's roofs, what operators reach below them, and what speculation would bring: computed, not measured.

The Medusa paper's figures 18 to 23 (arXiv 2401.10774, appendix G) drawn anew: Llama-33B on an A100-80GB PCIe, with the
points that it measured (Tables 6 to 8). `python benchmarks/roofline_figures.py` writes docs/images/roofline.png and
roofline-speedup.png; with `PROFILE FOLDER`, a profile of `treeopt profile --analytical` gives model and device, and
the pictures go to the folder.

N numbers of candidates, a tree's rows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from sys import argv
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
from medusa_tables import (
    BATCH_SIZE,
    CANDIDATES,
    CONTEXT,
    DEVICE,
    SHAPE,
    SOURCE,
    TFLOPS,
    attention_product,
    predicted_tflops,
)
from numpy.typing import NDArray

from treeopt.errors import InvalidInput
from treeopt.files import storage
from treeopt.latency.hardware import Device, ModelShape
from treeopt.latency.roofline import Operator, Step, linear, operator_us, step_operators
from treeopt.records.profile import LatencyProfile
from treeopt.report.figures.style import (
    COLOURS,
    GREY,
    LINES,
    MARKERS,
    blank,
    heading,
    log_axis,
    look,
    sentence,
    size_axis,
    to_bytes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FloatArray = NDArray[np.float64]
BATCHES, KEYS = (1, 2, 4, 8, 16, 32, 64), (128, 256, 512, 1024, 2048, 4096, 8192)
MOST, NUM_HEADS = 128, 4  # candidates and heads of the curves of speedup
TREE = 64  # rows of the step whose operators are shown
FIT = 0.477  # the paper's acceleration rate over log2 of the candidates; it does not say the base
KINDS = {"linear": "linear layers", "attention": "attention products", "elementwise": "all else"}


@dataclass(frozen=True)
class Setting:
    """What is drawn: a model on a device, and whether the paper measured it."""

    device: Device = DEVICE
    shape: ModelShape = SHAPE
    dtype: str = "float16"
    num_heads: int = NUM_HEADS

    @property
    def is_published(self) -> bool:
        return self.device == DEVICE and self.shape == SHAPE

    @property
    def caption(self) -> str:
        return f"{self.shape.name} in {self.dtype} on {self.device.name}"


def setting_of(file: Path) -> Setting:
    """What a computed profile was computed for."""
    known = LatencyProfile.load(file).info.get("roofline")
    if not isinstance(known, dict):
        raise InvalidInput(f"{file} must be a profile of treeopt profile --analytical, but nothing in it was computed.")
    return storage.typed(Setting, {**known, "shape": known.get("model")}, file)


@dataclass(frozen=True, eq=False)
class Curve:
    """Operators with 1, 2, ... N candidates: (N,) FLOP/byte and (N,) TFLOP/s as computed.

    measured : (8,) TFLOP/s at CANDIDATES, where the paper has the operator
    """

    label: str
    intensity: FloatArray
    tflops: FloatArray
    measured: FloatArray | None


@dataclass(frozen=True, eq=False)
class RooflineData:
    """Panels of curves below a device's roofs, and the operators of one step: (name, FLOP/byte, TFLOP/s)."""

    device: Device
    panels: tuple[tuple[str, str, tuple[Curve, ...]], ...]
    plain: tuple[tuple[str, float, float], ...]
    tree: tuple[tuple[str, float, float], ...]
    caption: str = ""


def roofline_data(setting: Setting | None = None) -> RooflineData:
    """Linear layers by batch size, attention by keys and by batch size, and the operators of a step.

    >>> data = roofline_data()
    >>> curve = data.panels[0][2][0]  # of batch size 1
    >>> float(curve.intensity[15].round(2)), float(curve.measured[1])  # Table 8, 16 candidates
    (15.95, 19.95)
    """
    setting = setting or Setting()
    shape = setting.shape
    group = shape.heads // shape.kv_heads

    def up(batch_size: int, candidates: int) -> Operator:
        return linear("up", batch_size * candidates, shape.width, shape.inner)

    def attention(batch_size: int, keys: int, candidates: int) -> Operator:
        return attention_product("QK^T", batch_size * shape.kv_heads, candidates * group, keys, shape.head_width)

    def curves(table: int, rows: Sequence[int], operator: Callable[[int, int], Operator]) -> tuple[Curve, ...]:
        found = []
        for row in rows:
            operators = [operator(row, candidates) for candidates in range(1, CANDIDATES[-1] + 1)]
            measured = np.array(TFLOPS[table][row]) if setting.is_published else None
            found.append(
                Curve(
                    f"{row:,}",
                    np.array([op.intensity for op in operators]),
                    np.array([predicted_tflops(op, setting.device) for op in operators]),
                    measured,
                )
            )
        return tuple(found)

    def step(size: int, num_heads: int) -> tuple[tuple[str, float, float], ...]:
        operators = step_operators(shape, Step(1, CONTEXT, size, num_heads))
        return tuple(
            (op.name, op.intensity, op.flops / operator_us(op, setting.device) / 1e6)
            for op in operators
            if op.kind != "elementwise"
        )

    panels = (
        ("A linear layer (up), by batch size", "batch size", curves(8, BATCHES, up)),
        (
            f"An attention product, by keys (batch size {BATCH_SIZE})",
            "keys",
            curves(6, KEYS, lambda keys, candidates: attention(BATCH_SIZE, keys, candidates)),
        ),
        (
            f"An attention product, by batch size ({CONTEXT} keys)",
            "batch size",
            curves(7, BATCHES, lambda batch, candidates: attention(batch, CONTEXT, candidates)),
        ),
    )
    points = f"dots measured: {SOURCE}; lines computed" if setting.is_published else "computed, nothing measured"
    caption = sentence(setting.caption, f"1 to {CANDIDATES[-1]} candidates along each line", points)
    return RooflineData(setting.device, panels, step(1, 0), step(TREE, setting.num_heads), caption)


@look()
def draw_roofline(data: RooflineData, figure: Figure | None = None) -> Figure:
    """Four panels on logarithmic axes; grey: the two roofs."""
    figure = figure or blank(width=7.0, height=7.0)
    grid = figure.subplots(2, 2, squeeze=False).ravel()
    for axes, (title, label, curves) in zip(grid, data.panels, strict=False):
        for i, curve in enumerate(curves):
            colour = COLOURS[i % len(COLOURS)]
            axes.plot(
                curve.intensity,
                curve.tflops,
                color=colour,
                linestyle=LINES[i % len(LINES)],
                linewidth=1,
                label=curve.label,
            )
            if curve.measured is not None:
                at = np.array(CANDIDATES) - 1
                axes.plot(curve.intensity[at], curve.measured, MARKERS[i], color=colour, markersize=3)
        _roofs(axes, data.device, [curve.intensity for curve in curves])
        axes.set_title(title)
        axes.legend(title=label, loc="lower right", ncols=2, alignment="left")
    last = grid[3]
    for i, (label, operators) in enumerate((("plain step", data.plain), (f"tree of {TREE} rows", data.tree))):
        last.plot(
            [op[1] for op in operators],
            [op[2] for op in operators],
            MARKERS[i],
            color=COLOURS[i],
            markersize=5,
            label=label,
            markerfacecolor="none",
        )
    groups = _groups(data)
    for letter, (_, x, y) in zip("ABCDEFGH", groups, strict=False):
        last.annotate(letter, (x, y), (7, 0), textcoords="offset points", va="center", weight="bold")
    key = [f"{letter}  {fill(', '.join(names), 30)}" for letter, (names, _, _) in zip("ABCDEFGH", groups, strict=False)]
    last.text(
        0.97,
        0.04,
        "\n".join(key),
        transform=last.transAxes,
        ha="right",
        va="bottom",
        multialignment="left",
        fontsize=6.5,
    )
    _roofs(last, data.device, [np.array([op[1] for op in (*data.plain, *data.tree)])])
    last.set_title(f"Operators of a step (batch size 1, context {CONTEXT})")
    last.legend(loc="upper left")
    heading(figure, f"Below the roofs of {data.device.name}", data.caption)
    return figure


def _groups(data: RooflineData) -> list[tuple[list[str], float, float]]:
    """Names of operators of about the same intensity, and where they lie."""
    found: list[tuple[list[str], list[float], list[float]]] = []
    for name, x, y in (*data.plain, *data.tree):
        near = next((group for group in found if abs(np.log(group[1][0] / x)) < 0.2), None)
        if near is None:
            found.append(near := ([], [], []))
        near[0].extend([] if name in near[0] else [name])
        near[1].append(x)
        near[2].append(y)
    return [(names, max(x), float(np.median(y))) for names, x, y in found]


def _roofs(axes: Axes, device: Device, intensities: Sequence[FloatArray]) -> None:
    """The roofs over the range of what was drawn, and the axes."""
    values = np.concatenate(intensities)
    low, high = float(values.min()) / 1.6, max(float(values.max()) * 1.6, device.tflops / device.tb_per_s * 1.6)
    x = np.geomspace(low, high, 200)
    axes.plot(x, np.minimum(x * device.tb_per_s, device.tflops), color=GREY, linewidth=2, zorder=1)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    log_axis(axes)
    axes.set(xlabel="FLOP per byte moved", ylabel="TFLOP/s")


@dataclass(frozen=True, eq=False)
class SpeedupData:
    """The paper's model of speedup over candidates: acceleration rate over normalised latency.

    candidates   : (N,)
    acceleration : (N,)  tokens per step by the paper's fit, at least 1
    shares       : kind of operator -> (N,) of a step's latency, at ``batch_size``
    by_batch, by_context : label -> (N,) a step's latency over the plain one
    """

    candidates: NDArray[np.int64]
    acceleration: FloatArray
    shares: dict[str, FloatArray]
    by_batch: dict[str, FloatArray]
    by_context: dict[str, FloatArray]
    caption: str = ""

    def speedup(self, overhead: FloatArray) -> FloatArray:
        """(N,) tokens per second over those of plain decoding."""
        found: FloatArray = self.acceleration / overhead
        return found


def speedup_data(setting: Setting | None = None) -> SpeedupData:
    """Latencies of whole steps by batch size and by context, as the roofline has them.

    >>> data = speedup_data()
    >>> data.candidates[[0, -1]].tolist(), round(float(data.acceleration[63]), 2)
    ([1, 128], 2.86)
    """
    setting = setting or Setting()
    sizes = np.arange(1, MOST + 1)

    def kinds(batch_size: int, context: int) -> dict[str, FloatArray]:
        """Kind -> (N,) [ms]; a lone root is a plain step."""
        found = {kind: np.zeros(len(sizes)) for kind in KINDS}
        for i, size in enumerate(sizes.tolist()):
            heads = min(setting.num_heads, size - 1)
            for op in step_operators(setting.shape, Step(batch_size, context, size, heads)):
                found[op.kind][i] += op.times * operator_us(op, setting.device) / 1e3
        return found

    def overhead(batch_size: int, context: int) -> FloatArray:
        total: FloatArray = np.sum(list(kinds(batch_size, context).values()), axis=0)
        over: FloatArray = total / total[0]
        return over

    parts = kinds(BATCH_SIZE, CONTEXT)
    total = np.sum(list(parts.values()), axis=0)
    return SpeedupData(
        candidates=sizes,
        acceleration=np.maximum(FIT * np.log2(sizes), 1.0),
        shares={KINDS[kind]: ms / total for kind, ms in parts.items()},
        by_batch={f"{batch}": overhead(batch, CONTEXT) for batch in BATCHES},
        by_context={f"{context:,}": overhead(BATCH_SIZE, context) for context in KEYS},
        caption=sentence(setting.caption, f"{setting.num_heads} heads", "computed, nothing measured"),
    )


@look()
def draw_speedup(data: SpeedupData, figure: Figure | None = None) -> Figure:
    """Acceleration and shares on the left; normalised latency and speedup, by batch size and by context."""
    figure = figure or blank(width=9.0, height=6.0)
    grid = figure.subplots(2, 3)
    grid[0, 0].plot(data.candidates, data.acceleration, color=COLOURS[0])
    grid[0, 0].set(title=f"Tokens per step: {FIT} log2(n)", ylabel="tokens per step", ylim=(0, None))
    for i, (name, share) in enumerate(data.shares.items()):
        grid[1, 0].plot(data.candidates, share, color=COLOURS[i], linestyle=LINES[i], label=name)
    grid[1, 0].set(title=f"Shares (batch size {BATCH_SIZE}, context {CONTEXT})", ylabel="share of a step", ylim=(0, 1))
    grid[1, 0].legend(loc="best")
    rows = (
        ("batch size", f"context {CONTEXT}", data.by_batch),
        ("context", f"batch size {BATCH_SIZE}", data.by_context),
    )
    for axes, (label, fixed, curves) in zip(grid, rows, strict=True):
        for i, (name, overhead) in enumerate(curves.items()):
            look_of = {"color": COLOURS[i % len(COLOURS)], "linestyle": LINES[i % len(LINES)], "label": name}
            axes[1].plot(data.candidates, overhead, **look_of)
            axes[2].plot(data.candidates, data.speedup(overhead), **look_of)
        log_axis(axes[1])
        axes[1].set(title=f"Latency over plain ({fixed})", ylabel="overhead")
        axes[2].set(title=f"Speedup ({fixed})", ylabel="speedup", ylim=(0, None))
        axes[2].axhline(1.0, color="black", linestyle=(0, (2, 3)), linewidth=0.9)
        axes[2].legend(title=label, loc="upper left", bbox_to_anchor=(1.01, 1.0), alignment="left", handlelength=3)
    for axes in grid.ravel():
        size_axis(axes, data.candidates)
        axes.set_xlabel("candidates (rows of the tree)")
    heading(figure, "What speculation would bring, by the roofline", data.caption)
    return figure


def write_figures(setting: Setting, folder: Path) -> list[Path]:
    """Both pictures as PNG files in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    drawings = {
        "roofline": draw_roofline(roofline_data(setting)),
        "roofline-speedup": draw_speedup(speedup_data(setting)),
    }
    for name, drawing in drawings.items():
        (folder / f"{name}.png").write_bytes(to_bytes(drawing, "png"))
    return [folder / f"{name}.png" for name in drawings]


if __name__ == "__main__":
    images = Path(__file__).parent.parent / "docs" / "images"
    for path in (
        write_figures(setting_of(Path(argv[1])), Path(argv[2])) if argv[1:] else write_figures(Setting(), images)
    ):
        print(path)
