"""What a search chose, for the terminal and the report: the table of trees, sentences on how sure the choice is, a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treeopt.report.terminal import grid, headline, together
from treeopt.report.verdict import doubts
from treeopt.report.wording import count, pm, ranges

if TYPE_CHECKING:
    from rich.console import RenderableType

    from treeopt.records.plan import Plan, PlanEntry
    from treeopt.trees.tree import Choice, Tree


PREDICTED = ("tokens/step\nproduct", "tokens/step\njoint", "tokens/step\nreplayed")


def plan_table(plan: Plan) -> RenderableType:
    """One row per batch size: the chosen tree and what to expect of it; then how sure the choice is."""
    title = "The best tree for the mix of loads" if plan.mix else "The best tree for each batch size"
    said = [*map(certainty, plan.entries), price(plan), schedule(plan)]
    columns = ("batch", "rows", "depth", "widths", *PREDICTED, "step ms", "tokens/s", "speedup")
    rows, caption = map(plan_row, plan.entries), "\n".join(filter(None, said))
    table = grid(title, columns, rows, caption=caption, wraps=("widths",), spare=PREDICTED[:2])
    return together(*headline(*doubts(plan)), table)


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
    """Which sizes are as good as the chosen one; empty where nothing is known. The ``hint`` is what would tell them apart."""
    runner, tied = entry.runner_up, entry.tied_sizes
    if runner is None or entry.interval95 is None or entry.interval95.tokens_per_step is None:
        return ""
    said = f"Batch size {entry.batch_size}: "
    others = [size for size in tied if size != entry.size]
    said += f"sizes {ranges(tied)} are tied" if others else "no other size is tied"
    ahead, error = 100 * runner.behind, 100 * runner.behind_stderr
    which = "behind" if ahead >= 0 else "ahead"
    said += f"; the next best, {count(runner.size, 'row')}, is {abs(ahead):.1f} ±{error:.1f} % {which}"
    if others and hint and runner.prompts_to_separate:
        said += f". About {runner.prompts_to_separate:,} prompts would tell them apart if latencies were exact"
    elif others and hint:
        said += ". More prompts would not tell them apart, but a longer profile may"
    verified = entry.verified
    if verified and verified.afresh.speedup:
        said += f". Verified by decoding: fastest of {len(verified.finalists) - 1}, and on fresh prompts "
        said += f"{verified.afresh.speedup.value:.2f} times as fast as plain"
    return said + "."


def price(plan: Plan) -> str:
    """What the shape or another limit costs; empty where it costs nothing, or every tree was allowed."""
    from treeopt.planning.select import NEGLIGIBLE

    parts = []
    for e in plan.entries:
        if (free := e.unconstrained) is None:
            continue
        if (less := 1 - e.rate / free.rate) >= NEGLIGIBLE:
            kind = "chain" if e.size == e.depth + 1 else f"{plan.constraint.shape if plan.constraint else None} tree"
            kind = "choice is not to speculate," if e.size == 1 else kind
            parts.append(
                f"best {kind} {e.tokens_per_step:.2f} tokens per step, best tree {free.tokens_per_step:.2f} "
                f"({count(free.size, 'row')}) at batch size {e.batch_size}, {less:.0%} {'slower' if e.tokens_per_s else 'fewer'}"
            )
    return f"The limits cost: {'; '.join(parts)}." if parts else ""


def schedule(plan: Plan) -> str:
    """Which batch sizes get which tree, and what it costs to give several the same; empty for a single range."""
    if len(plan.schedule) < 2 or plan.mix:
        return ""
    parts = []
    for part in plan.schedule:
        entry, first, last = plan.entries[part.entry], part.first, part.last
        which = f"{first} on" if last is None else str(first) if last == first else f"{first}–{last}"
        chain = entry.size == entry.depth + 1
        tree = f"chain of {entry.depth}" if chain else f"{entry.size} rows, {entry.depth} deep"
        parts.append(f"{which}: {'do not speculate' if entry.size == 1 else tree}")
    most = max(part.loss or 0.0 for part in plan.schedule)
    shared = f" Sharing trees costs at most {most:.1%}, within the noise." if most else ""
    between = " A batch size between those asked for gets what the next smaller one gets."
    return f"Schedule by batch size: {'; '.join(parts)}.{shared}{between}"


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
