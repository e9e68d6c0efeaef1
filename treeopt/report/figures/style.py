"""One look for all figures, and how a figure becomes PNG or SVG.

Series differ in colour (Okabe and Ito's, safe for the colour-blind), marker and line style at once. What is predicted,
replayed and measured has a colour of its own in every figure and in the report. Every figure has a title, and below it a
line that says how much was measured and of what. A figure is as wide as a phone shows it. Nothing here touches matplotlib's
global state: `look` restores the settings that it changes.
"""

from __future__ import annotations

import io
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from treeopt.files.shell import printable
from treeopt.records.origins import Provenance
from treeopt.records.rules import option_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_INCHES = (3.9, 3.2)
DPI = 150
FORMATS = ("png", "svg")

BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK, GREY = "#E69F00", "#56B4E9", "#000000", "#888888"
COLOURS = (VERMILLION, PURPLE, SKY, BLACK, GREY)  # for series; the others are those of kinds
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (3, 1, 1, 1)), (0, (1, 1)))
SEQUENTIAL = "viridis_r"  # dark is much

Look = dict[str, Any]  # options of matplotlib by name
KINDS: dict[str, Look] = {
    "predicted": {"color": ORANGE, "marker": "D"},
    "replayed": {"color": GREEN, "marker": "s"},
    "measured": {"color": BLUE, "marker": "o"},
}
_LOOK: Look = {
    "font.size": 8, "axes.titlesize": 8.5, "axes.titlelocation": "left", "axes.labelsize": 8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#E3E3E3", "grid.linewidth": 0.6, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "legend.fontsize": 7, "legend.title_fontsize": 7.5, "legend.frameon": False,
    "lines.linewidth": 1.3, "lines.markersize": 4, "path.simplify": False,
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "svg.hashsalt": "treeopt",  # the same figure, the same file
}  # fmt: skip


@contextmanager
def look() -> Iterator[None]:
    """Draw and save in the project's style; usable as a decorator."""
    screen = os.environ.pop(
        "MPLBACKEND", None
    )  # perhaps a notebook's; matplotlib does not load where it is not installed
    from matplotlib import style

    if screen is not None:
        os.environ["MPLBACKEND"] = screen
    with style.context(["default", _LOOK]):
        yield


def blank(width: float = SIZE_INCHES[0], height: float = SIZE_INCHES[1]) -> Figure:
    """An empty figure of this size in inches, whose parts make room for each other; a notebook shows it as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    vars(figure)["_repr_png_"] = partial(to_bytes, figure, "png")  # of itself Jupyter would show the size alone
    return figure


def heading(figure: Figure, title: str, caption: str) -> None:
    """The title above everything, and what was measured below everything, as wide as the figure."""
    width = figure.get_figwidth()  # matplotlib's own wrapping takes dollar signs for formulas
    figure.suptitle(textwrap.fill(title, int(width * 11)), x=0.01, ha="left", fontsize=10, weight="bold")
    figure.supxlabel(textwrap.fill(caption, int(width * 20)), x=0.01, ha="left", fontsize=6.5, color="#555555")


def series(i: int) -> Look:
    """Colour, marker and line style of the i-th of several series; no two of the first 40 are alike."""
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "linestyle": LINES[i % len(LINES)]}


def each(count: int, kind: str) -> list[Look]:
    """Looks of so many series of one kind; a single one has the colour of its kind."""
    return [{**KINDS[kind], "linestyle": "-"}] if count == 1 else list(map(series, range(count)))


def size_axis(axes: Axes, sizes: ArrayLike) -> None:
    """Rows on a logarithmic axis with a tick at each power of two."""
    low = float(np.min(sizes)) if np.size(sizes) else 1.0
    high = max(float(np.max(sizes, initial=low)), 2 * low)
    axes.set_xscale("log", base=2)
    powers = 2 ** np.arange(np.floor(np.log2(low)), np.ceil(np.log2(high)) + 1)
    axes.set_xticks(powers, [f"{power:g}" for power in powers])
    axes.set_xticks([], minor=True)
    axes.set_xlim(low * 0.87, high * 1.15)


def log_axis(axes: Axes) -> None:
    """Plain numbers along a logarithmic vertical axis, for what is already drawn on it."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = axes.get_ylim()
    few = high < 20 * low
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 1.5, 2, 3, 5, 7) if few else (1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")


def short(name: str, most: int = 22) -> str:
    """A name that fits beside an axis, its end left out."""
    return name if len(name) <= most else name[: most - 1] + "…"


def known(record: Mapping[str, Any] | None, *keys: str, between: str = " ") -> str:
    """The values of some keys, as far as they are there.

    >>> known({"name": "vllm", "version": "0.33.0", "attention": None}, "name", "version", "attention")
    'vllm 0.33.0'
    """
    return between.join(str((record or {})[key]) for key in keys if (record or {}).get(key))


def origin(provenance: Provenance) -> str:
    """Model, number format and device, as far as they are known."""
    return known(vars(provenance), "model", "dtype", "device", between=", ")


def sentence(*parts: str | None) -> str:
    """The known parts of a caption with a dot between them."""
    return " · ".join(filter(None, parts))


def about(info: Mapping[str, Any], counted: str, *more: str | None) -> str:
    """A caption: what was counted, of which model and by which rule, as a record says it, and more."""
    return sentence(counted, origin(Provenance.of(info)), rule(info.get("acceptance")), *more)


def rule(acceptance: Mapping[str, Any] | None) -> str:
    return option_of(acceptance) if acceptance else ""


def span(numbers: Sequence[int]) -> str:
    return "–".join(f"{end:,}" for end in sorted({min(numbers), max(numbers)}))


@look()
def to_bytes(figure: Figure, kind: str) -> bytes:
    """The figure as a PNG or SVG file, without dates: the same figure gives the same bytes."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_text(printable(text.get_text()))
    stream = io.BytesIO()
    nobody = {"png": ["Software"], "svg": ["Date", "Creator"]}[kind]
    figure.savefig(stream, format=kind, dpi=DPI, metadata=dict.fromkeys(nobody))
    if kind == "png":
        return stream.getvalue()
    clips: dict[str, str] = {}  # named for places to the last bit, which two layouts of one figure need not share
    drawn = re.sub(
        r"(?<=[#\"])p[0-9a-f]{10}\b",
        lambda name: clips.setdefault(name[0], f"clip-{len(clips) + 1}"),
        stream.getvalue().decode(),
    )
    return printable(drawn).encode()


def svg_element(file: bytes, prefix: str = "", titles: Mapping[str, str] | None = None) -> str:
    """The <svg> element of a file, to put into a page.

    prefix : keeps the ids of several in one page apart
    titles : id of an element to its title, which a browser shows under the pointer
    """
    text = file.decode()
    text = text[text.index("<svg") :]
    for element, title in (titles or {}).items():
        start = f'<g id="{element}">'
        text = text.replace(start, f"{start}<title>{escape(title)}</title>", 1)
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", text)
