"""How often guesses are right, depth by depth: by rank, by group of prompts, and along the answer.

Intervals are Wilson's at 95 %, with states taken as independent; neighbours in a text are not quite. Under rejection
ranks say which drafted tokens are accepted, and in an engine's log which were: there is one rank then.

K heads, or depths · R ranks · G groups · B buckets of positions
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from treeopt.errors import InvalidInput, OutOfRange
from treeopt.records.calibration import ENGINE_LOG, Calibration
from treeopt.records.drafters import depth_noun
from treeopt.records.trace import NO_TRIAL, RankTrace
from treeopt.report.figures import style
from treeopt.report.figures.chart import HEIGHT, Chart, Estimates, Panel, Series, wilson
from treeopt.report.figures.style import Look
from treeopt.report.wording import count
from treeopt.trees.tree import MAX_RANK

INTERVALS = "95 % intervals, states as independent"


@dataclass(frozen=True)
class GuessWords:
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
    def about(cls, info: Mapping[str, Any]) -> GuessWords:
        """The words for what a calibration or a trace says of itself."""
        accepted = (info.get("acceptance") or {}).get("rule") == "rejection"
        if accepted or info.get("source") == ENGINE_LOG:
            return cls("depth", "drafted tokens are accepted", "accepted", "share of drafted tokens")
        who = depth_noun(info.get("drafter"))
        return cls(who, "the heads are right" if who == "head" else "guesses are right")


def accuracy_chart(calibration: Calibration, *, ranks: int = MAX_RANK + 1) -> Chart:
    """Share of the trials in which the true token was at each rank, and down to it; of one rank a line over depth.

    >>> chart = accuracy_chart(Calibration(np.array([[60, 20], [40, 10]]), np.array([100, 100])))
    >>> [chart[1][depth].y.tolist() for depth in ("1", "2")]
    [[0.6, 0.8], [0.4, 0.5]]
    """
    hits, trials = calibration.hits[:, :ranks], calibration.trials[:, None]
    info, words = calibration.meta, GuessWords.about(calibration.meta)
    sequences, is_log = info.get("sequences"), info.get("source") == ENGINE_LOG
    single, cumulative = wilson(hits, trials), wilson(hits.cumsum(1), trials)
    heads, ranks = hits.shape
    counted = count(int(trials.max()), "draft" if is_log else "state")
    counted += f" of {count(sequences, 'sequence')}" if isinstance(sequences, int) else ""
    caption = style.about(
        info,
        style.sentence(counted, "published figures" if info.get("source") == "published" else None),
        "only drafts whose earlier tokens were accepted" if is_log else None,
        "95 % intervals, drafts as independent" if is_log else INTERVALS,
        "hollow marks at the lower edge: 0" if ranks > 1 and (single.value == 0).any() else None,
    )
    if ranks == 1:
        line = single[:, 0].over("", np.arange(1, heads + 1), **style.series(0))
        panel = Panel([line], words.guesser, words.of, scale="whole", xlim=(0.5, heads + 0.5), ylim=(0, 1.02))
        return Chart(f"How often {words.right}, by {words.guesser}", caption, [[panel]], legend=None)
    dodge = (np.arange(heads) - (heads - 1) / 2) * min(0.4 / max(heads - 1, 1), 0.1)
    left, right = [], []
    for k in range(heads):
        look, x = style.series(k), np.arange(ranks) + dodge[k]
        never = single.value[k] == 0  # a logarithmic axis has no place for 0
        left.append(single[k, ~never].over("", x[~never], **look))
        hollow = {**look, "linestyle": "none", "markerfacecolor": "white"}
        left.append(Series("", x[never], np.zeros(never.sum()), look=hollow, kind="edge"))
        right.append(cumulative[k].over(str(k + 1), x + 1, **look))
    xlabel, last, among = "rank (0 is the best candidate)", ranks - 0.5, "Among the first k candidates"
    panels = [
        Panel(left, xlabel, words.of, "At this rank", "whole", log=True, xlim=(-0.5, last)),
        Panel(right, "k candidates", words.of, among, "whole", xlim=(0.5, last + 1), ylim=(0, 1.02)),
    ]
    return Chart(f"How often {words.right}, by rank", caption, [panels], words.guesser)


def groups_chart(groups: Mapping[str, Mapping[str, Any]], info: Mapping[str, Any] | None = None) -> Chart:
    """Groups by the accuracy at depth 1, best first; tokens per step beside them where they are known for every group.

    groups : a calibration's, name to hits (K x R), trials (K) and sequences; ``info`` is all that it says

    >>> groups = {"chat": {"hits": [[3]], "trials": [10], "sequences": 1},
    ...           "code": {"hits": [[9]], "trials": [10], "sequences": 2}}
    >>> groups_chart(groups)[0].rows
    ['code (2)', 'chat (1)']
    """
    info = info or {}
    words = GuessWords.about(info)
    try:
        hits = np.stack([np.asarray(group["hits"])[:, 0] for group in groups.values()])
        trials = np.stack([np.asarray(group["trials"]) for group in groups.values()])
        order = np.argsort(-hits[:, 0] / trials[:, 0], kind="stable")
        found, top1 = [list(groups.items())[i] for i in order], wilson(hits, trials)[order]
        sequences = [int(group.get("sequences", 0)) for _, group in found]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise InvalidInput(f"A calibration's groups need hits and trials of every head: {error!r}.") from None
    heads, y = hits.shape[1], np.arange(len(found))
    dodge = (np.arange(heads) - (heads - 1) / 2) * min(0.68 / max(heads - 1, 1), 0.15)
    rows = [f"{style.short(name)} ({n})" for (name, _), n in zip(found, sequences, strict=True)]
    named: Look = {"rows": rows, "height": max(HEIGHT, len(rows) * max(0.3, 0.06 * heads))}
    marks = [top1[:, k].along(str(k + 1), y + dodge[k], **style.series(k)) for k in range(heads)]
    panels = [Panel(marks, f"{words.share} [{words.of}]", "group (sequences)", xlim=(0, None), width=3, **named)]
    rates = [(group.get("tokens_per_step"), None, group.get("tokens_per_step_stderr")) for _, group in found]
    if all(rate is not None for rate, *_ in rates):
        known = Estimates.of(rates)
        low, high = min(1.0, float(known.ends.min())), float(known.ends.max())
        marks = [known.along("", y, color="black", marker="D")]
        panels.append(Panel(marks, "tokens per step", xlim=(low, low + 1.08 * max(high - low, 0.1)), **named))
    counted = f"{count(int(trials.max(1).sum()), 'state')} of {count(sum(sequences), 'sequence')}"
    title = f"How often {words.right}, by group of prompts"
    return Chart(title, style.about(info, counted, INTERVALS), [panels], words.guesser)


def positions_chart(trace: RankTrace, *, buckets: int = 8) -> Chart:
    """Top-1 accuracy at each depth in up to ``buckets`` ranges of positions with about equally many states.

    Thin lines part the ranges; points stand at the mean position of the states in each.

    >>> trace = RankTrace(np.array([[0], [0], [0], [3], [-2]]), np.array([0, 5]))
    >>> panel = positions_chart(trace, buckets=2)[0]
    >>> panel.breaks, panel["1"].y.tolist()
    ([1.5], [1.0, 0.5])
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
    top1, words = wilson(hits, trials), GuessWords.about(trace.meta)
    counted = f"{count(len(position), 'state')} of {count(trace.num_sequences, 'sequence')}"
    lines = [top1[k].over(str(k + 1), middle, **style.series(k)) for k in range(len(trials))]
    axes: Look = {"xlim": (0, int(edges[-1])), "ylim": (0, None), "breaks": (edges[1:-1] - 0.5).tolist()}
    panel = Panel(lines, "position in the answer [tokens]", f"{words.share} [{words.of}]", **axes)
    title = f"How often {words.right} along the answer"
    return Chart(title, style.about(trace.meta, counted, INTERVALS), [[panel]], words.guesser)
