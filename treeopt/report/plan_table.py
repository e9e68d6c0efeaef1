"""What a search chose, for the terminal and the report: the table of trees, how sure the choice is, and a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treeopt.report.dynamic_table import KINDS, KINDS_NOTE, against, kind_rows, settings
from treeopt.report.terminal import grid, headline, together
from treeopt.report.verdict import doubts
from treeopt.report.wording import count, lost, percentages, pm, ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from treeopt.records.expected import RunnerUp
    from treeopt.records.plan import Plan, PlanEntry
    from treeopt.records.ranges import BatchRange
    from treeopt.trees.tree import Choice, Tree


PREDICTED = ("tokens/step\nproduct", "tokens/step\njoint", "tokens/step\nreplayed")


def plan_table(plan: Plan) -> RenderableType:
    """One row per batch size: the chosen tree and what to expect of it; then how sure the choice is."""
    served = settings(plan)
    what = "chain" if served else "tree"
    title = f"One {what} for the mix of loads" if plan.mix else f"The best {what} for each batch size"
    said = [*map(certainty, plan.entries), mixture(plan), price(plan), "" if served else schedule(plan), drawn(plan)]
    columns = ("batch", "rows", "depth", "widths", *PREDICTED, "step ms", "tokens/s", "speedup")
    caption = "\n".join(filter(None, said))
    table = grid(title, columns, plan_rows(plan), caption=caption, wraps=("batch", "widths"), spare=PREDICTED[:2])
    kinds = kind_rows(plan)
    note = "\n".join(filter(None, (served, KINDS_NOTE)))
    beside = [grid("Fixed and dynamic trees", KINDS, kinds, caption=note)] if kinds else []
    return together(*headline(*(against(plan, plan.entries) if served else doubts(plan))), table, *beside)


def plan_rows(plan: Plan) -> list[tuple[str, ...]]:
    """The cells of every entry, and those of a mix over all."""
    rows = [plan_row(entry) for entry in plan.entries]
    if plan.mix:
        shares = percentages([plan.mix[entry.batch_size] for entry in plan.entries])
        rows = [(f"{cells[0]} ({share})", *cells[1:]) for cells, share in zip(rows, shares, strict=True)]
    if plan.total:
        rates = pm(plan.total.tokens_per_s, plan.total.tokens_per_s_stderr, 0)
        speedup = pm(plan.total.speedup, plan.total.speedup_stderr)
        rows.append(("mix", *rows[0][1:7], "–", rates, speedup))
    return rows


def plan_row(e: PlanEntry) -> tuple[str, ...]:
    """The cells of an entry."""
    return (
        str(e.batch_size),
        str(e.size),
        str(e.depth),
        "do not speculate" if e.size == 1 else " ".join(map(str, e.tree.widths())),
        pm(e.predicted.product, None),
        pm(e.predicted.joint, None),
        pm(e.predicted.replayed, e.tokens_per_step_stderr),
        pm(e.step_ms, e.step_ms_stderr),
        pm(e.tokens_per_s, e.tokens_per_s_stderr, 0),
        pm(e.speedup, e.speedup_stderr),
    )


def certainty(entry: PlanEntry, *, hint: bool = True) -> str:
    """Which sizes are as good as the chosen one; empty where not known. The ``hint`` is what would tell them apart."""
    if entry.runner_up is None or entry.interval95 is None or entry.interval95.tokens_per_step is None:
        return ""
    said = f"Batch size {entry.batch_size}: {_ties(entry, entry.tied_sizes, entry.runner_up, hint=hint)}"
    verified = entry.verified
    if verified and verified.afresh.speedup:
        said += f". Verified by decoding: fastest of {len(verified.finalists) - 1}, and on fresh prompts "
        said += f"{verified.afresh.speedup.value:.2f} times as fast as plain"
    return said + "."


def _ties(entry: PlanEntry, tied: list[int], runner: RunnerUp, *, hint: bool = True) -> str:
    """Which sizes are tied with the chosen one, and how far the next best is behind."""
    from treeopt.planning.select import ASKED

    others = [one for one in tied if one != entry.size]
    said = f"sizes {ranges(tied)} are tied" if others else "no other size is tied"
    ahead, error = 100 * runner.behind, 100 * runner.behind_stderr
    which = "behind" if ahead >= 0 else "ahead"
    said += f"; the next best, {count(runner.size, 'row')}, is {abs(ahead):.1f} ±{error:.1f} % {which}"
    if not (others and hint):
        return said
    if (needed := runner.prompts_to_separate) is not None:
        many = f"About {needed:,} prompts" if needed <= ASKED else f"More than {ASKED:,} prompts"
        return f"{said}. {many} would tell them apart if latencies were exact"
    if entry.predicted.conversations:
        return f"{said}. More prompts would not tell them apart, but a longer profile may"
    return f"{said}. A longer profile may tell them apart"


def drawn(plan: Plan) -> str:
    """How many conversations were planned with where not all were, and what that costs in error bars; else empty."""
    if (sample := plan.sample) is None:
        return ""
    said = (
        f"Planned with {sample.conversations:,} of {sample.of:,} conversations, drawn at random (seed {sample.seed}). "
    )
    said += f"What conversations are uncertain of is {sample.wider:.1f} times as wide as with all of them"
    errors = [entry.tokens_per_step_stderr for entry in plan.entries]
    if (error := max((e for e in errors if e is not None), default=None)) is not None:
        said += f": ±{error:.2g} tokens per step, where all would give about ±{error / sample.wider:.2g}"
    return said + "."


def mixture(plan: Plan, *, hint: bool = True) -> str:
    """What one tree for a mix of loads reaches, and what it costs not to have one for each; empty without a mix."""
    if not plan.mix:
        return ""
    said = "A percentage is the share of the time that the server decodes so many sequences at once."
    if (total := plan.total) is None:
        return said
    said += (
        f" The row of the mix has the mean over the time: {total.tokens_per_s:,.0f} tokens per second, "
        f"{pm(total.speedup, total.speedup_stderr)} times plain decoding."
    )
    losses = [(e.batch_size, 1 - e.rate / e.own.rate) for e in plan.entries if e.own]
    each = ", ".join(f"{max(loss, 0):.1%} at batch size {size}" for size, loss in losses)
    said += (
        f" With its own tree for each batch size it would be {total.own_tokens_per_s:,.0f}: sharing one costs "
        f"{max(total.price, 0):.1%} over the mix ({each})."
    )
    if total.runner_up:
        said += f" Over the mix {_ties(plan.entries[0], total.tied_sizes, total.runner_up, hint=hint)}."
    return said


def price(plan: Plan) -> str:
    """What the shape or another limit costs; empty where it costs nothing, or every tree was allowed."""
    from treeopt.planning.select import NEGLIGIBLE

    parts = []
    for e in plan.entries:
        if (free := e.unconstrained) is None:
            continue
        if (less := 1 - e.rate / free.rate) >= NEGLIGIBLE:
            parts.append(
                f"at batch size {e.batch_size}, within the limits {e.tokens_per_step:.2f} tokens per step "
                f"({tree_words(e)}), without them {free.tokens_per_step:.2f} ({count(free.size, 'row')}), {less:.0%} "
                f"{'slower' if e.tokens_per_s else 'fewer'}"
            )
    return f"The limits cost speed: {'; '.join(parts)}." if parts else ""


def schedule(plan: Plan) -> str:
    """Which batch sizes get which tree, what sharing costs, and how sure it is between; empty for one batch size."""
    if len(plan.entries) < 2 or plan.mix:
        return ""
    parts = [f"{_range(part)}: {tree_words(plan.entries[part.entry])}" for part in plan.schedule]
    searched = [entry.batch_size for entry in plan.entries]
    said = f"Schedule by batch size: {'; '.join(parts)}. Searched: {', '.join(map(str, searched))}."
    if most := max(part.loss or 0.0 for part in plan.schedule):
        said += f" Sharing trees costs at most {most:.1%} at these, within the noise."
    between = [part.between for part in plan.schedule if part.between is not None]
    if between:
        said += (
            " Between these the step times are interpolated: by that estimate the schedule loses at most "
            f"{max(between):.1%} there."
        )
        unknown = [_range(part) for part in plan.schedule if part.between is None and _has_between(part, searched)]
        tests = f" in {count(plan.tests_between, 'test')}" if plan.tests_between else ""
        said += (
            " How far that is off is not known: it takes a searched batch size between two with different trees."
            if plan.error_between is None
            else " Where searched batch sizes were left out, such estimates were off by up to "
            f"{plan.error_between:.1%}{tests}."
        )
        said += f" What the trees lose between these within {', '.join(unknown)} is not known." if unknown else ""
    elif searched[-1] - searched[0] >= len(searched):
        said += " A batch size between these gets what the next smaller one gets; what it loses is not known."
    said += f" Above {searched[-1]} nothing was searched"
    return said + (f", and below {searched[0]}." if searched[0] > 1 else ".")


def _has_between(part: BatchRange, searched: list[int]) -> bool:
    """Whether a range has batch sizes between those that were searched."""
    first, last = max(part.first, searched[0]), min(part.last or searched[-1], searched[-1])
    return last - first + 1 > sum(first <= size <= last for size in searched)


def _range(part: BatchRange) -> str:
    """The batch sizes of a range.

    >>> from treeopt.records.ranges import BatchRange
    >>> _range(BatchRange(first=1, last=4, entry=0)), _range(BatchRange(first=5, last=None, entry=0))
    ('1–4', '5 on')
    """
    if part.last is None:
        return f"{part.first} on"
    return str(part.first) if part.last == part.first else f"{part.first}–{part.last}"


def tree_words(entry: PlanEntry) -> str:
    """The tree of an entry in a few words."""
    if entry.size == 1:
        return "do not speculate"
    return f"chain of {entry.depth}" if entry.size == entry.depth + 1 else f"{entry.size} rows, {entry.depth} deep"


def written_for(plan: Plan, sizes: Sequence[int | None]) -> list[str]:
    """For which load an export is, and what it loses against each batch size's own tree.

    sizes : batch sizes whose trees are written; None alone for a schedule, or for the one tree that all have
    """
    if plan.mix:
        sizes, amounts = zip(*sorted(plan.mix.items()), strict=True)
        parts = zip(percentages(amounts), sizes, strict=True)
        shares = [f"{share} of the time at {size}" for share, size in parts]
        price = lost([(e.batch_size, 1 - e.rate / e.own.rate) for e in plan.entries if e.own])
        load = f"the mix of batch sizes ({', '.join(shares)})"
        return [f"Written for {load}: {tree_words(plan.entries[0])}.{price}"]
    if list(sizes) == [None] and len(plan.entries) > 1:
        return [f"Written for all batch sizes. {schedule(plan)}"]
    entries = [plan.entry(size) for size in sizes]
    if len(entries) > 1:
        said = [f"Written for each batch size, to start a server with: {', '.join(map(_with_size, entries))}."]
        timed = [e for e in plan.entries if len(e.elsewhere) == len(plan.entries)]
        if shared := min(timed, key=lambda e: max(e.elsewhere.values()), default=None):
            said.append(f"For one server take that of --batch-size {shared.batch_size}.{_losses(plan, shared)}")
        return said
    known = _losses(plan, entries[0]) or " What it loses at other batch sizes is not known."
    return [f"Written for batch size {_with_size(entries[0])}.{known}"]


def _with_size(entry: PlanEntry) -> str:
    return f"{entry.batch_size} ({tree_words(entry)})"


def _losses(plan: Plan, entry: PlanEntry) -> str:
    """What an entry's tree loses at the plan's other batch sizes; empty where nothing is known."""
    said = lost([(size, loss) for size, loss in sorted(entry.elsewhere.items()) if size != entry.batch_size])
    missing = [str(e.batch_size) for e in plan.entries if e.batch_size not in entry.elsewhere]
    return said + (f" At {', '.join(missing)} that is not known." if said and missing else "")


def tree_view(tree: Tree, gains: dict[Choice, float] | None = None) -> RenderableType:
    """The tree as indented lines; a node shows its rank, and the tokens per step that it adds."""
    from rich.text import Text
    from rich.tree import Tree as View

    rows, choices = count(len(tree), "row"), count(len(tree) - 1, "choice")
    heading = f"root: {rows}, {choices}, depth {tree.depth}"
    views = [View(heading, guide_style="dim")]
    for node in range(1, len(tree)):
        path = tree.paths[node]
        gain = (gains or {}).get(path)
        adds = "" if gain is None else f"  {gain:+.4f}"
        label = Text.assemble((str(path[-1]), "bold"), " ", (str(list(path)), "dim"), adds)
        views.append(views[tree.parents[node]].add(label))
    return views[0]
