"""What a plan says in sentences: what to use at each batch size, what it is predicted to bring, and what speaks against it."""

from collections.abc import Mapping

from treeopt.records.benchmark import Benchmark
from treeopt.records.estimate import NEGLIGIBLE, Estimate
from treeopt.records.figure import Figure, fastest
from treeopt.records.plan import EXACT, Plan, PlanEntry, by_batch_size
from treeopt.records.rundir import RunDirectory
from treeopt.report.verdict import ADVICE, BY_DEFAULT, doubt, outcome, speedup_over, weighed
from treeopt.report.wording import percent
from treeopt.trees.draft import Draft
from treeopt.trees.tree import Tree


def recommendations(plan: Plan) -> list[str]:
    """A sentence for each batch size, or for the mix of them: what to use, and what it is predicted to bring."""
    if not plan.mix:
        return [f"Batch size {entry.batch_size}: {_recommendation(plan, entry)}" for entry in plan.entries]
    entry, speedup = plan.entries[0], plan.mix_speedup
    if not entry.speculates:
        return [f"Over the mix: do not speculate. {' '.join(_mix_doubts(plan))}"]
    brought = _tokens(entry) if speedup is None else f"{speedup:.2f} times plain, predicted"
    return [" ".join([f"Over the mix: use {described(entry.draft)}: {brought}.", *_mix_doubts(plan)])]


def _recommendation(plan: Plan, entry: PlanEntry) -> str:
    if entry.speculates:
        brought = _brought(plan, entry, entry) if entry.speedup else _tokens(entry)
        return " ".join([f"use {described(entry.draft)}: {brought}.", *predicted_doubts(plan, entry)])
    best = best_speculation(entry)
    if best is None or best.speedup is None:
        return "do not speculate: no draft was compared."
    beside = f"The best, {described(best.draft)}: {_brought(plan, entry, best)}."
    return f"do not speculate. {not_speculating(plan, entry).partition(':')[0]}. {beside}"


def described(draft: Draft) -> str:
    """A draft in a sentence: a tree by its rows and how many nodes each depth has.

    >>> described(Tree.from_choices([[0], [1], [0, 0]])), described(Tree.chain(3))
    ('4 rows (widths 2 1)', 'a chain of 3')
    """
    if isinstance(draft, Tree) and len(draft) > draft.depth + 1:
        return f"{len(draft)} rows (widths {' '.join(map(str, draft.widths()))})"
    return f"a {draft.words}" if isinstance(draft, Tree) else draft.words


def _brought(plan: Plan, entry: PlanEntry, figure: Figure) -> str:
    """The predicted speedup with its interval, and what it is over."""
    speedup = figure.speedup or Estimate(1.0)
    bound = f", by {plan.part} alone" if plan.part else ""
    error = "error not known" if speedup.low is None else f"{speedup.low:.2f} to {speedup.high:.2f}"
    over = BY_DEFAULT if EXACT in entry.others else "plain"
    return f"{'at most ' if plan.part else ''}{speedup:.2f} times {over} ({error}), predicted{bound}"


def _tokens(figure: Figure) -> str:
    return f"{figure.tokens_per_step:.2f} tokens per step, predicted; no step was timed"


def best_speculation(entry: PlanEntry) -> Figure | None:
    """The fastest draft beside a choice not to speculate; None where none was compared."""
    return fastest([figure for figure in entry.others.values() if figure.size > 1])


def not_speculating(plan: Plan, entry: PlanEntry) -> str:
    """A sentence: no tree pays, where the best one's interval or bound is below plain decoding, else none is shown to pay."""
    best, noun = best_speculation(entry), "setting" if plan.copies else "tree"
    speedup = best.speedup if best else None
    is_slower = outcome(speedup) == "loss" or (plan.part is not None and speedup is not None and speedup <= 1)
    return f"No {noun} {'pays' if is_slower else 'is shown to pay'} here{ADVICE}."


def next_commands(run: RunDirectory, plan: Plan) -> str:
    """What to run after a search; empty where the plan does not speculate."""
    if not plan.speculates:
        return ""
    engine = plan.constraint.engine.name if plan.constraint and plan.constraint.engine else "ENGINE"
    commands = [run.command("export", "--to", engine)]
    if run.can_decode:
        commands.insert(0, run.command("profile" if plan.entries[0].step_ms is None else "bench"))
    return f"Next: {', or '.join(commands)}."


def doubts(plan: Plan, benches: Mapping[int, Benchmark] | None = None, *, batch_size: int | None = None) -> list[str]:
    """What there is against a plan's trees, each sentence once, with the batch sizes that it is for unless these are all.

    benches    : batch size -> its benchmark, where the latencies were timed; the others go by the prediction
    batch_size : of this one alone
    """
    entries = plan.entries if batch_size is None else (plan.entry(batch_size),)
    found = {e.batch_size: entry_doubts(plan, e, (benches or {}).get(e.batch_size)) for e in entries}
    return [*(_mix_doubts(plan) if plan.mix else []), *by_batch_size(found)]


def entry_doubts(plan: Plan, entry: PlanEntry, bench: Benchmark | None) -> list[str]:
    """What there is against the tree of one of a plan's batch sizes: what was measured, or without that the prediction.

    bench : its benchmark; None where there is none, or where the latencies were timed elsewhere

    A mix is not judged by the prediction for one of its batch sizes, nor is it served without speculation there.
    """
    if bench is not None and speedup_over(bench) is not None:
        return [said.replace(ADVICE, "") if plan.mix else said for said in weighed(bench)[0]]
    return [] if plan.mix else predicted_doubts(plan, entry)


def _mix_doubts(plan: Plan) -> list[str]:
    """What there is against one tree for a mix of loads, as it is predicted."""
    if (total := plan.mix_speedup) is None:
        return []
    entry = plan.entries[0]
    if not entry.speculates:
        return [f"No tree is shown to pay over the mix{ADVICE}."]
    found = _speedup_doubts(total, entry, "over the mix")
    known_speedups = [(e.batch_size, e.speedup) for e in plan.entries if e.speedup]
    if slower := [f"{size} ({speedup:.2f} times)" for size, speedup in known_speedups if speedup < 1]:
        found.append(f"The one tree is predicted to be slower than plain decoding at batch size {', '.join(slower)}.")
    return found


def predicted_doubts(plan: Plan, entry: PlanEntry) -> list[str]:
    """What a plan's entry says against its tree.

    Empty where latencies are not known, or all speaks for it.
    """
    speedup, rate = entry.speedup, entry.tokens_per_s
    if speedup is None or rate is None:
        return []
    if not entry.speculates:
        return [not_speculating(plan, entry)]
    found = _speedup_doubts(speedup, entry, "here")
    chain = entry.best("chain")
    if chain and chain.tokens_per_s:
        gain = chain.tokens_per_s / rate
        if gain > 1 + NEGLIGIBLE and chain.tokens_per_s > rate.ends[1]:
            ahead = percent(gain, "slower", "faster")
            found.append(f"The chosen tree loses against a chain of {chain.depth}, which is predicted to be {ahead}.")
    return found


def _speedup_doubts(speedup: Estimate, entry: PlanEntry, where: str) -> list[str]:
    """What a predicted speedup says against speculation; without an interval it is taken as it is where it is above 1."""
    said = doubt(speedup, where, is_predicted=True)
    if said and (outcome(speedup) != "few" or speedup <= 1):
        return [said]
    if 1 in entry.tied_sizes:
        return [f"Speculation is not shown to pay {where}: plain decoding is tied with it."]
    return []
