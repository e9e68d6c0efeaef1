"""How often guesses are right, depth by depth: by rank, by group of prompts, and along the answer.

Intervals are Wilson's at 95 %, with states taken as independent; neighbours in a text are not quite. Under rejection
ranks say which drafted tokens are accepted, and in an engine's log which were: there is one rank then.

K heads, or depths · R ranks · G groups · B buckets of positions
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import InvalidInput, OutOfRange
from treeopt.records.calibration import ENGINE_LOG, Calibration
from treeopt.records.rules import guesser
from treeopt.records.trace import NO_TRIAL, RankTrace
from treeopt.report.figures import style
from treeopt.report.wording import count
from treeopt.trees.tree import MAX_RANK, IntArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INTERVALS = "95 % intervals, states as independent"


@dataclass(frozen=True)
class Words:
    """How guesses are spoken of.

    guesser : what guesses at each depth, head or depth
    right   : what a share counts, "the heads are right"
    share   : its name beside an axis; of: what it is a share of
    """

    guesser: str = "depth"
    right: str = "guesses are right"
    share: str = "top-1 accuracy"
    of: str = "share of states"

    @classmethod
    def about(cls, info: Mapping[str, Any]) -> Words:
        """Those for what a calibration or a trace says of itself."""
        accepted = (info.get("acceptance") or {}).get("rule") == "rejection"
        if accepted or info.get("source") == ENGINE_LOG:
            return cls("depth", "drafted tokens are accepted", "accepted", "share of drafted tokens")
        who = guesser(info.get("drafter"))
        return cls(who, "the heads are right" if who == "head" else "guesses are right")


@dataclass(frozen=True, eq=False)
class AccuracyData:
    """Accuracy at each depth.

    single     : (K, R)  at exactly this rank
    cumulative : (K, R)  at this rank or a better one
    trials     : (K,)
    """

    single: style.Shares
    cumulative: style.Shares
    trials: IntArray
    caption: str = ""
    words: Words = Words()


def accuracy_data(calibration: Calibration, *, ranks: int = MAX_RANK + 1) -> AccuracyData:
    """Share of the trials in which the true token was at, and down to, each rank.

    >>> data = accuracy_data(Calibration(np.array([[60, 20], [40, 10]]), np.array([100, 100])))
    >>> data.cumulative.value.tolist()
    [[0.6, 0.8], [0.4, 0.5]]
    """
    hits, trials = calibration.hits[:, :ranks], calibration.trials
    info = calibration.meta
    sequences, is_log = info.get("sequences"), info.get("source") == ENGINE_LOG
    caption = style.sentence(
        f"{count(int(trials.max()), 'draft' if is_log else 'state')}"
        + (f" of {count(sequences, 'sequence')}" if isinstance(sequences, int) else ""),
        "published figures" if info.get("source") == "published" else None,
        style.origin(info.get("provenance")),
        style.rule(info.get("acceptance")),
        "only drafts whose earlier tokens were accepted" if is_log else None,
        "95 % intervals, drafts as independent" if is_log else INTERVALS,
    )
    return AccuracyData(
        style.wilson(hits, trials[:, None]),
        style.wilson(hits.cumsum(1), trials[:, None]),
        trials,
        caption,
        Words.about(info),
    )


@style.look()
def draw_accuracy(data: AccuracyData, figure: Figure | None = None) -> Figure:
    """Single ranks on the left (logarithmic), top-1 ... top-k on the right; of one rank a single line over depth."""
    figure = figure or style.blank()
    words, (heads, ranks) = data.words, data.single.value.shape
    if ranks == 1:
        return _draw_only_rank(data, figure)
    left, right = figure.subplots(1, 2)
    dodge = (np.arange(heads) - (heads - 1) / 2) * min(0.4 / max(heads - 1, 1), 0.1)
    for k in range(heads):
        line, x = style.series(k), np.arange(ranks) + dodge[k]
        never = data.single.value[k] == 0  # a logarithmic axis has no place for 0
        style.bars(left, x[~never], data.single[k, ~never], **line)
        left.plot(
            x[never],
            np.zeros(never.sum()),
            transform=left.get_xaxis_transform(),
            clip_on=False,
            zorder=3,
            **{**line, "linestyle": "none", "markerfacecolor": "white"},
        )
        style.bars(right, np.arange(1, ranks + 1) + dodge[k], data.cumulative[k], label=f"{k + 1}", **line)
    style.log_axis(left)
    left.set_xlim(-0.5, ranks - 0.5)
    right.set_xlim(0.5, ranks + 0.5)
    left.set(title="At this rank", xlabel="rank (0 is the best candidate)", ylabel=words.of)
    right.set(title="Among the first k candidates", xlabel="k candidates", ylabel=words.of, ylim=(0, 1.02))
    for axes in (left, right):
        axes.locator_params(axis="x", nbins=10, integer=True)
    style.legend(right, words.guesser)
    zeros = "hollow marks at the lower edge: 0" if (data.single.value == 0).any() else None
    style.heading(figure, f"How often {words.right}, by rank", style.sentence(data.caption, zeros))
    return figure


def _draw_only_rank(data: AccuracyData, figure: Figure) -> Figure:
    axes: Axes = figure.add_subplot()
    words, heads = data.words, len(data.trials)
    style.bars(axes, np.arange(1, heads + 1), data.single[:, 0], **style.series(0))
    axes.set(xlim=(0.5, heads + 0.5), ylim=(0, 1.02), xlabel=words.guesser, ylabel=words.of)
    axes.locator_params(axis="x", nbins=10, integer=True, min_n_ticks=1)
    style.heading(figure, f"How often {words.right}, by {words.guesser}", data.caption)
    return figure


@dataclass(frozen=True, eq=False)
class GroupsData:
    """Groups by the accuracy at depth 1, best first.

    top1            : (G, K)  share of the trials in which the best candidate was right
    tokens_per_step : (G,)    None where it is not known for every group; with 95 % intervals
    """

    names: tuple[str, ...]
    top1: style.Shares
    sequences: tuple[int, ...]
    tokens_per_step: style.Shares | None = None
    caption: str = ""
    words: Words = Words()


def groups_data(groups: Mapping[str, Mapping[str, Any]], info: Mapping[str, Any] | None = None) -> GroupsData:
    """From a calibration's ``groups``: name to hits (K x R), trials (K) and sequences; ``info`` is all that it says.

    >>> groups = {"chat": {"hits": [[3]], "trials": [10], "sequences": 1},
    ...           "code": {"hits": [[9]], "trials": [10], "sequences": 1}}
    >>> groups_data(groups).names
    ('code', 'chat')
    """
    try:
        hits = np.stack([np.asarray(group["hits"])[:, 0] for group in groups.values()])
        trials = np.stack([np.asarray(group["trials"]) for group in groups.values()])
        order = np.argsort(-hits[:, 0] / trials[:, 0], kind="stable")
        names, hits, trials = [list(groups)[i] for i in order], hits[order], trials[order]
        sequences = tuple(int(groups[name].get("sequences", 0)) for name in names)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise InvalidInput(f"A calibration's groups need hits and trials of every head: {error!r}.") from None
    rates = [groups[name].get("tokens_per_step") for name in names]
    info, states = info or {}, count(int(trials.max(1).sum()), "state")
    caption = style.sentence(
        f"{states} of {count(sum(sequences), 'sequence')}",
        style.origin(info.get("provenance")),
        style.rule(info.get("acceptance")),
        INTERVALS,
    )
    known = np.array([rate for rate in rates if rate is not None], dtype=float)
    half = style.Z95 * np.array([groups[name].get("tokens_per_step_stderr") or 0.0 for name in names], dtype=float)
    return GroupsData(
        tuple(names),
        style.wilson(hits, trials),
        sequences,
        style.Shares(known, known - half, known + half) if len(known) == len(names) else None,
        caption,
        Words.about(info),
    )


@style.look()
def draw_groups(data: GroupsData, figure: Figure | None = None) -> Figure:
    """One line for each group, one mark for each depth; tokens per step beside them where known."""
    n_groups, heads = data.top1.value.shape
    figure = figure or style.blank(height=max(4.5, 1.4 + n_groups * max(0.3, 0.06 * heads)))
    panels = 1 if data.tokens_per_step is None else 2
    grid = figure.subplots(1, panels, sharey=True, squeeze=False, width_ratios=[3, 1][:panels])[0]
    axes, rows = grid[0], np.arange(n_groups)
    dodge = (np.arange(heads) - (heads - 1) / 2) * min(0.68 / max(heads - 1, 1), 0.15)
    for k in range(heads):
        share = data.top1[:, k]
        line = {**style.series(k), "linestyle": "none"}
        axes.errorbar(share.value, rows + dodge[k], xerr=share.errors, elinewidth=0.8, label=f"{k + 1}", **line)
    counts = zip(data.names, data.sequences, strict=True)
    axes.set_yticks(rows, [f"{style.short(name)} ({n})" for name, n in counts])
    axes.set(
        ylim=(n_groups - 0.5, -0.5),
        xlim=(0, None),
        ylabel="group (sequences)",
        xlabel=f"{data.words.share} [{data.words.of}]",
    )
    if data.tokens_per_step is not None:
        rates = data.tokens_per_step
        grid[1].errorbar(rates.value, rows, xerr=rates.errors, fmt="D", color="black", elinewidth=0.8)
        low, high = min(1.0, float(rates.low.min())), float(rates.high.max())
        grid[1].set(xlabel="tokens per step", xlim=(low, low + 1.08 * max(high - low, 0.1)))
    for panel in grid:
        panel.grid(visible=False, axis="y")
        for row in rows[::2]:
            panel.axhspan(row - 0.5, row + 0.5, color="#F4F4F4", zorder=-1)
    style.legend(grid[-1], data.words.guesser, handles=axes.get_legend_handles_labels()[0])
    style.heading(figure, f"How often {data.words.right}, by group of prompts", data.caption)
    return figure


@dataclass(frozen=True, eq=False)
class PositionsData:
    """Accuracy along the answer.

    edges  : (B+1,)  bucket b holds the states edges[b] ... edges[b+1]-1 of their answers
    middle : (B,)    mean position of the states in each
    top1   : (K, B)
    trials : (K, B)
    """

    edges: IntArray
    middle: NDArray[np.float64]
    top1: style.Shares
    trials: IntArray
    caption: str = ""
    words: Words = Words()


def positions_data(trace: RankTrace, *, buckets: int = 8) -> PositionsData:
    """Top-1 accuracy at each depth in up to ``buckets`` ranges of positions with about equally many states.

    >>> trace = RankTrace(np.array([[0], [0], [0], [3], [-2]]), np.array([0, 5]))
    >>> data = positions_data(trace, buckets=2)
    >>> data.edges.tolist(), data.top1.value.tolist()
    ([0, 2, 4], [[1.0, 0.5]])
    """
    states = trace.has_step
    position = (np.arange(len(trace.ranks)) - np.repeat(trace.starts[:-1], trace.lengths))[states]
    if not len(position):
        raise OutOfRange("Accuracy along the answer needs an answer of at least 2 tokens. Calibrate on more.")
    ranks = trace.ranks[states]
    cuts = np.sort(position)[np.arange(buckets) * len(position) // buckets]
    edges = np.unique([0, *cuts, position.max() + 1])
    bucket = np.searchsorted(edges, position, side="right") - 1
    n = len(edges) - 1
    hits = np.stack([np.bincount(bucket[column == 0], minlength=n) for column in ranks.T])
    trials = np.stack([np.bincount(bucket[column != NO_TRIAL], minlength=n) for column in ranks.T])
    middle = np.bincount(bucket, position, n) / np.bincount(bucket, minlength=n)
    caption = style.sentence(
        f"{count(len(position), 'state')} of {count(trace.num_sequences, 'sequence')}",
        style.origin(trace.meta.get("provenance")),
        style.rule(trace.meta.get("acceptance")),
        INTERVALS,
    )
    return PositionsData(edges, middle, style.wilson(hits, trials), trials, caption, Words.about(trace.meta))


@style.look()
def draw_positions(data: PositionsData, figure: Figure | None = None) -> Figure:
    """One line for each depth; grey lines part the buckets."""
    figure = figure or style.blank()
    axes: Axes = figure.add_subplot()
    for edge in data.edges[1:-1]:
        axes.axvline(float(edge) - 0.5, color="#DDDDDD", linewidth=0.8, zorder=0)
    for k in range(len(data.trials)):
        style.bars(axes, data.middle, data.top1[k], label=f"{k + 1}", **style.series(k))
    axes.grid(visible=False, axis="x")
    axes.set(
        xlim=(0, int(data.edges[-1])),
        ylim=(0, None),
        xlabel="position in the answer [tokens]",
        ylabel=f"{data.words.share} [{data.words.of}]",
    )
    style.legend(axes, data.words.guesser)
    style.heading(figure, f"How often {data.words.right} along the answer", data.caption)
    return figure
