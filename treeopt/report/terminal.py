"""What the terminal shows: tables on stdout, progress on stderr, nothing where there is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

    from treeopt.records.calibration import Calibration
    from treeopt.records.plan import Plan, PlanEntry
    from treeopt.records.profile import LatencyProfile, StepTiming
    from treeopt.trees.tree import Choice, Tree

Advance = Callable[[float], None]

MOST_SIZES = 24  # of a setting in a table; beyond them those below are shown, and the largest
SHOWN_SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
PARTS = ("draft", "target", "verify", "commit")  # of a step, in their order


def out(renderable: RenderableType | str) -> None:
    """Print a result to stdout; plain text where it is no terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    console.print(renderable)


def note(message: str) -> None:
    """Print talk to stderr."""
    from rich.console import Console

    Console(stderr=True, highlight=False).print(message, style="dim", markup=False, soft_wrap=True)


@contextmanager
def progress(title: str, total: float | None) -> Iterator[Advance]:
    """A progress bar on stderr; silent when stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<34}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda amount: bar.update(task, advance=amount)
        if total:
            bar.update(task, completed=total)


def calibration_table(calibration: Calibration, ranks: int = 5) -> RenderableType:
    """Accuracy of each head, or at each depth, at the first ranks, with its standard error."""
    from rich.table import Table

    from treeopt.records.rules import guesser

    info = calibration.meta
    if info.get("source") == "engine log" and info.get("survival"):
        return _survival_table(calibration)
    counted = [
        f"{info[key]:,} {what}" for key, what in (("positions", "states"), ("sequences", "answers")) if info.get(key)
    ]
    who = guesser(info.get("drafter") or {"kind": "medusa"})
    is_rejection = (info.get("acceptance") or {}).get("rule") == "rejection"
    what = "Head accuracy" if who == "head" else "Accuracy by depth"
    if is_rejection:
        what = "Share accepted by depth"
    title = what + (f" over {' of '.join(counted)}" if counted else "")
    table = Table(title=title, title_justify="left", caption=_caption(info), caption_justify="left")
    table.add_column(who)
    ranks = min(ranks, calibration.top_k)
    for rank in range(ranks):
        table.add_column(f"rank {rank}", justify="right")
    table.add_column("trials", justify="right")
    for k in range(calibration.num_heads):
        cells = [f"{calibration.accept[k, r]:.3f} ±{calibration.stderr[k, r]:.3f}" for r in range(ranks)]
        table.add_row(str(k + 1), *cells, str(calibration.trials[k]))
    groups = info.get("groups")
    if is_rejection:
        table.caption = f"{table.caption or ''} {_chains(calibration)}".strip()
    return together(table, _group_table(groups, calibration.num_heads)) if groups else table


def _chains(calibration: Calibration) -> str:
    """What chains reach by the formula of the papers, which takes one acceptance rate for all tokens."""
    from treeopt.planning.chain_theory import chain_tokens_per_step

    accept = float(calibration.hits.sum() / calibration.trials.sum())
    rates = [f"{chain_tokens_per_step(accept, n):.2f}" for n in range(1, calibration.num_heads + 1)]
    return (
        f"A drafted token is accepted with probability {accept:.2f}: chains of 1, 2, ... would give {', '.join(rates)} "
        "tokens per step if that were the same everywhere."
    )


def _survival_table(calibration: Calibration) -> RenderableType:
    """Survival of a chain depth by depth, as an engine counted it."""
    from rich.table import Table

    info, accept = calibration.meta, calibration.accept[:, 0]
    title = "Survival of a chain, as an engine counted it"
    if info.get("drafts"):
        of = f" of {info['requests']:,} requests" if info.get("requests") else ""
        title += f": {info['drafts']:,} drafts{of}"
    table = Table(title=title, title_justify="left")
    table.add_column("depth")
    for name in ("all right so far", "of those right before", "trials"):
        table.add_column(name, justify="right")
    errors = info.get("survival_stderr") or [None] * calibration.num_heads
    for k, (survival, error) in enumerate(zip(info["survival"], errors, strict=False)):
        table.add_row(str(k + 1), pm(survival, error, 3), pm(accept[k], None, 3), str(calibration.trials[k]))
    return table


def _group_table(groups: dict[str, Any], num_heads: int) -> RenderableType:
    """Top-1 accuracy of each head, and tokens per step, group by group."""
    from rich.table import Table

    table = Table(title="By group: accuracy at rank 0, held-out tokens per step with 64 rows", title_justify="left")
    for name in ("group", "answers", *(f"head {k + 1}" for k in range(num_heads)), "tokens/step"):
        table.add_column(name, justify="left" if name == "group" else "right")
    for name, group in groups.items():
        tops = [f"{h[0] / t:.3f}" if t else "–" for h, t in zip(group["hits"], group["trials"], strict=True)]
        rate = pm(group.get("tokens_per_step"), group.get("tokens_per_step_stderr"))
        table.add_row(name, str(group["sequences"]), *tops, rate)
    return table


def _caption(info: dict[str, Any]) -> str | None:
    """What else there is to know of the answers."""
    said = []
    if info.get("loop_share"):
        said.append(f"{info['loop_share']:.0%} of the answers ended in a loop and were cut there.")
    answers = info.get("answers") or {}
    if answers.get("given"):
        agreement = (
            f"the target's own first choice is the given token in {info.get('target_agreement', 0):.1%} of the states."
        )
        kind = (
            "An estimate for greedy decoding, from given answers"
            if answers.get("is_estimate")
            else f"From answers sampled by the target itself at temperature {answers['temperature']:g}"
        )
        said.append(f"{kind}: {agreement}")
    if info.get("skipped"):
        said.append(f"{len(info['skipped'])} prompts or turns left out (listed in calibration.json).")
    return " ".join(said) or None


def together(*renderables: RenderableType) -> RenderableType:
    from rich.console import Group

    return Group(*renderables)


def profile_table(profile: LatencyProfile) -> RenderableType:
    """Median step latency by size, at the deepest measured depth, and its ratio to a plain step."""
    from rich.table import Table

    from treeopt.latency.estimate import StepCosts

    table = Table(title="Latency of one decoding step (median)", title_justify="left")
    for name in ("batch", "context", "rows", "depth", "ms", "over plain", "samples", *PARTS):
        table.add_column(name, justify="right")
    for batch, context in profile.settings:
        costs = StepCosts(profile, batch, context)
        plain = costs.plain
        timed = [p for p in profile.autoregressive if p.setting == (batch, context)]
        table.add_row(
            str(batch),
            str(context or "–"),
            "1",
            "plain",
            f"{plain.ms:.2f} ±{plain.stderr_ms:.2f}",
            "1.00",
            str(sum(len(p.step_ms) for p in timed)),
            *_parts(timed[0]),
        )
        deepest: dict[int, Any] = {}
        for point in profile.points:
            here = point.setting == (batch, context)
            if here and (point.size not in deepest or point.depth > deepest[point.size].depth):
                deepest[point.size] = point
        if len(deepest) > MOST_SIZES:
            table.caption = "Not every size is shown; profile.json has them all."
        for size, point in sorted(deepest.items()):
            if len(deepest) > MOST_SIZES and size not in SHOWN_SIZES and size != max(deepest):
                continue
            latency = costs.step(size, point.depth)
            if latency is not None:
                table.add_row(
                    str(batch),
                    str(context or "–"),
                    str(size),
                    str(point.depth),
                    f"{latency.ms:.2f} ±{latency.stderr_ms:.2f}",
                    f"{latency.ms / plain.ms:.2f}",
                    str(len(point.step_ms)),
                    *_parts(point),
                )
        table.add_section()
    return table


def _parts(timing: StepTiming) -> list[str]:
    """Median share of each part in the sum of all; they are timed in steps of their own."""
    from statistics import median

    ms = {part: median(samples) for part, samples in timing.whole_parts().items()}
    return [f"{ms[part] / sum(ms.values()):.0%}" if part in ms else "–" for part in PARTS]


def plan_table(plan: Plan) -> RenderableType:
    """One row per batch size: the chosen tree and what to expect of it; then how sure the choice is."""
    from rich.table import Table

    title = "The best tree for the mix of loads" if plan.mix else "The best tree for each batch size"
    said = [*map(certainty, plan.entries), price(plan), schedule(plan)]
    table = Table(
        title=title, title_justify="left", caption="\n".join(filter(None, said)) or None, caption_justify="left"
    )
    for name in (
        "batch",
        "rows",
        "depth",
        "widths",
        "tokens/step\nproduct",
        "\njoint",
        "\nreplayed",
        "step ms",
        "tokens/s",
        "speedup",
    ):
        table.add_column(name, justify="right")
    for e in plan.entries:
        widths = "do not speculate" if e.size == 1 else " ".join(map(str, e.tree.widths()))
        table.add_row(
            str(e.batch_size),
            str(e.size),
            str(e.depth),
            widths,
            pm(e.predicted.product, None),
            pm(e.predicted.joint, None),
            pm(e.predicted.replayed, e.tokens_per_step_stderr),
            pm(e.step_ms, e.step_ms_stderr),
            pm(e.tokens_per_s, e.tokens_per_s_stderr, 0),
            pm(e.speedup, e.speedup_stderr),
        )
    return table


def certainty(entry: PlanEntry) -> str:
    """Which sizes are as good as the chosen one, and what it would take to tell; empty where nothing is known."""
    runner, tied = entry.runner_up, entry.tied_sizes
    if runner is None or entry.interval95 is None or entry.interval95.tokens_per_step is None:
        return ""
    said = f"Batch size {entry.batch_size}: "
    others = [size for size in tied if size != entry.size]
    said += f"sizes {_ranges(tied)} are tied" if others else "no other size is tied"
    ahead, error = 100 * runner.behind, 100 * runner.behind_stderr
    which = "behind" if ahead >= 0 else "ahead"
    said += f"; the next best, {count(runner.size, 'row')}, is {abs(ahead):.1f} ±{error:.1f} % {which}"
    if others and runner.prompts_to_separate:
        said += f", which some {runner.prompts_to_separate:,} prompts would settle, latencies aside"
    elif others:
        said += ", which more prompts would not settle; a longer profile may"
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


def _ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 as 1-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def tree_view(tree: Tree, gains: dict[Choice, float] | None = None) -> RenderableType:
    """The tree as indented lines; a node shows its rank, and the tokens per step that it adds."""
    from rich.tree import Tree as View

    rows, choices = count(len(tree), "row"), count(len(tree) - 1, "choice")
    heading = f"root: {rows}, {choices}, depth {tree.depth}"
    views = [View(heading, guide_style="dim")]
    for node in range(1, len(tree)):
        path = tree.paths[node]
        gain = (gains or {}).get(path)
        label = f"[bold]{path[-1]}[/] [dim]{list(path)}[/]" + ("" if gain is None else f"  {gain:+.4f}")
        views.append(views[tree.parents[node]].add(label))
    return views[0]


def pm(value: float | None, error: float | None, digits: int = 2) -> str:
    """A figure with its standard error.

    >>> pm(1.5, 0.02), pm(None, None)
    ('1.50 ±0.02', '–')
    """
    if value is None:
        return "–"
    return f"{value:.{digits}f}" + ("" if error is None else f" ±{error:.{digits}f}")


def count(n: int, noun: str) -> str:
    """A number with its noun.

    >>> count(1, "sequence"), count(4228, "state")
    ('1 sequence', '4,228 states')
    """
    return f"{n:,} {noun}" + ("" if n == 1 else "s")
