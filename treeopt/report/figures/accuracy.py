"""How often guesses are right: by rank and by group of prompts.

Intervals are Wilson's at 95 %, of as many independent states as would have the error of a head's first rank over conversations;
those of groups take all states as independent. Under rejection
ranks say which drafted tokens are accepted, and in an engine's log which were: there is one rank then.

K heads, or depths · R ranks · G groups
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.records.calibration import ENGINE_LOG, Calibration
from treeopt.records.drafters import depth_noun
from treeopt.report.figures import style
from treeopt.report.figures.chart import HEIGHT, Chart, Panel, Series, along, intervals, over, wilson
from treeopt.report.figures.style import Look
from treeopt.report.wording import count
from treeopt.trees.tree import MAX_RANK

INTERVALS, OVER_CONVERSATIONS = "95 % intervals, states as independent", "95 % intervals over conversations"


def _words(info: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """What guesses at each depth, what a share counts, "the heads are right", its name, and what it is a share of."""
    accepted = (info.get("acceptance") or {}).get("rule") == "rejection"
    if accepted or info.get("source") == ENGINE_LOG:
        return "depth", "drafted tokens are accepted", "accepted", "share of drafted tokens"
    who = depth_noun(info.get("drafter"))
    right = "the heads are right" if who == "head" else "guesses are right"
    return who, right, "top-1 accuracy", "share of states"


def accuracy_chart(calibration: Calibration, *, ranks: int = MAX_RANK + 1) -> Chart:
    """Share of the trials in which the true token was at each rank, and down to it; of one rank a line over depth."""
    hits, trials = calibration.hits[:, :ranks], calibration.trials[:, None]
    info = calibration.meta
    guesser, right, _, of = _words(info)
    sequences, is_log = info.get("sequences"), info.get("source") == ENGINE_LOG
    worth = calibration.independent[:, None]
    single, cumulative = wilson(hits * worth, trials * worth), wilson(hits.cumsum(1) * worth, trials * worth)
    heads, ranks = hits.shape
    counted = count(int(trials.max()), "draft" if is_log else "state")
    counted += f" of {count(sequences, 'sequence')}" if isinstance(sequences, int) else ""
    caption = style.about(
        info,
        style.sentence(counted, "published figures" if info.get("source") == "published" else None),
        "only drafts whose earlier tokens were accepted" if is_log else None,
        "95 % intervals, drafts as independent" if is_log else INTERVALS if (worth == 1).all() else OVER_CONVERSATIONS,
        "hollow marks at the lower edge: 0" if ranks > 1 and (single[0] == 0).any() else None,
    )
    if ranks == 1:
        line = over("", np.arange(1, heads + 1), single[:, :, 0], **style.KINDS["measured"])
        panel = Panel([line], guesser, of, scale="whole", xlim=(0.5, heads + 0.5), ylim=(0, 1.02))
        return Chart(f"How often {right}, by {guesser}", caption, [panel])
    dodge = (np.arange(heads) - (heads - 1) / 2) * min(0.4 / max(heads - 1, 1), 0.1)
    singles, among = [], []
    for k, look in enumerate(style.each(heads, "measured")):
        x = np.arange(ranks) + dodge[k]
        never = single[0, k] == 0  # a logarithmic axis has no place for 0
        singles.append(over("", x[~never], single[:, k, ~never], **look))
        hollow = {**look, "linestyle": "none", "markerfacecolor": "white"}
        singles.append(Series("", x[never], np.zeros(never.sum()), look=hollow, kind="edge"))
        among.append(over(str(k + 1), x + 1, cumulative[:, k], **look))
    xlabel, last, title = "rank (0 is the best candidate)", ranks - 0.5, "Among the first k candidates"
    panels = [
        Panel(singles, xlabel, of, "At this rank", "whole", log=True, xlim=(-0.5, last)),
        Panel(among, "k candidates", of, title, "whole", xlim=(0.5, last + 1), ylim=(0, 1.02)),
    ]
    return Chart(f"How often {right}, by rank", caption, panels, guesser)


def groups_chart(groups: Mapping[str, Mapping[str, Any]], info: Mapping[str, Any] | None = None) -> Chart:
    """Groups by the accuracy at depth 1, best first; tokens per step beside them where they are known for every group.

    groups : a calibration's, name to hits (K x R), trials (K) and sequences; ``info`` is all that it says
    """
    info = info or {}
    guesser, right, share, _ = _words(info)
    try:
        hits = np.stack([np.asarray(group["hits"])[:, 0] for group in groups.values()])
        trials = np.stack([np.asarray(group["trials"]) for group in groups.values()])
        order = np.argsort(-hits[:, 0] / trials[:, 0], kind="stable")
        found, top1 = [list(groups.items())[i] for i in order], wilson(hits, trials)[:, order]
        sequences = [int(group.get("sequences", 0)) for _, group in found]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise InvalidInput(f"A calibration's groups need hits and trials of every head: {error!r}.") from None
    heads, y = hits.shape[1], np.arange(len(found))
    dodge = (np.arange(heads) - (heads - 1) / 2) * min(0.68 / max(heads - 1, 1), 0.15)
    rows = [f"{style.short(name, 18)} ({n})" for (name, _), n in zip(found, sequences, strict=True)]
    named: Look = {"rows": rows, "height": max(HEIGHT, len(rows) * max(0.3, 0.06 * heads))}
    looks = style.each(heads, "measured")
    marks = [along(str(k + 1), y + dodge[k], top1[:, :, k], **looks[k]) for k in range(heads)]
    panels = [Panel(marks, share, "group (sequences)", xlim=(0, None), **named)]
    rates = [group.get("tokens_per_step") for _, group in found]
    if None not in rates:
        known = intervals(rates)
        low, high = min(1.0, float(known.min())), float(known.max())
        marks = [along("", y, known, **style.KINDS["predicted"])]
        panels.append(
            Panel(
                marks,
                "tokens per step, held out",
                "group (sequences)",
                xlim=(low, low + 1.08 * max(high - low, 0.1)),
                **named,
            )
        )
    counted = f"{count(int(trials.max(1).sum()), 'state')} of {count(sum(sequences), 'sequence')}"
    title = f"How often {right}, by group of prompts"
    return Chart(title, style.about(info, counted, INTERVALS), panels, guesser)
