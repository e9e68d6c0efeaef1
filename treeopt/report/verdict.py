"""Whether speculation pays, in sentences for the terminal, the report and exports. What speaks against it comes first.

chosen   the contender with the plan's tree
rivals   the other contenders, plain decoding aside
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treeopt.planning.select import NEGLIGIBLE
from treeopt.records.benchmark import Benchmark, Ratio
from treeopt.report.wording import count, pm

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from treeopt.records.plan import Plan, PlanEntry

PUBLISHED = "mc_sim_7b_63"
CONTENDERS = {
    "plain": "plain decoding",
    "chosen": "chosen by treeopt",
    "mc_sim_7b_63": "published mc_sim_7b_63",
    "chain": "best top-1 chain",
    "budget": "best of full budget",
}
IN_ENGINE = {"plain": "plain decoding", "chosen": "chosen by treeopt", "defaults": "the engine's own settings"}
RIVALS = {PUBLISHED: "the published tree", "chain": "the best chain", "budget": "the best tree of the full budget"}
ADVICE = ": serve the model without it"


def label(bench: Benchmark, name: str) -> str:
    """What a contender is called in tables. Other runtimes have other contenders, so that files may take more names."""
    if name == bench.judged != "chosen":
        return f"{name}, chosen by treeopt" if name == "dynamic" else f"{name}, for the plan's tree"
    return (IN_ENGINE if bench.engine else CONTENDERS).get(name, name)


def subject(bench: Benchmark) -> str:
    """What is judged, as sentences begin with it."""
    return {"chosen": "The chosen tree", "dynamic": "The dynamic tree"}.get(bench.judged, f"The {bench.judged}")


def doubt(speedup: Ratio) -> str:
    """What to say first where a speedup over plain decoding is not shown to be above 1; empty where it is.

    >>> doubt(Ratio(value=1.2, low=1.1, high=1.3)), doubt(Ratio(value=0.8, low=0.7, high=0.9))
    ('', 'Speculation loses here: serve the model without it.')
    """
    if speedup.low is None or speedup.high is None:
        return "Speculation is not shown to gain here: the prompts are too few for an interval."
    if speedup.high < 1:
        return f"Speculation loses here{ADVICE}."
    if speedup.low <= 1:
        return (
            f"Speculation is not shown to gain here: the 95 % interval of its speedup is {speedup.low:.2f} to "
            f"{speedup.high:.2f}."
        )
    return ""


def measured_doubts(bench: Benchmark) -> list[str]:
    """What a benchmark says against the chosen tree: plain decoding is as fast, or a rival is faster.

    Empty where nothing was timed.
    """
    speedup = speedup_over(bench, "plain")
    if speedup is None:
        return []
    against = doubt(speedup) if bench.contender(bench.judged).size > 1 else ""
    return [*([against] if against else []), *(said for said, lost in _rivals(bench) if lost)]


def measured(bench: Benchmark) -> str:
    """What a benchmark comes to, in sentences; what speaks against the chosen tree is the first."""
    speedup = speedup_over(bench, "plain")
    if speedup is None:
        timed = bench.contenders[0].tokens_per_s is not None
        return "" if timed else "Nothing was timed: the prompts are too few for a full batch."
    size = bench.contender(bench.judged).size
    if size == 1:
        result = "The plan does not speculate at this batch size."
    else:
        result = f"{subject(bench)} ({count(size, 'row')} a step) decodes {times(speedup)} as fast as plain decoding."
    return " ".join([*measured_doubts(bench), result, *measured_ties(bench)])


def measured_ties(bench: Benchmark) -> list[str]:
    """How the chosen tree stands to the rivals that it does not lose against: the published tree, a chain that it ties."""
    found = [said for said, lost in _rivals(bench) if not lost]
    over = speedup_over(bench, PUBLISHED)
    if over is not None and over.low is not None and over.low > 1:
        rows = count(bench.contender(PUBLISHED).size, "row")
        found.append(f"{subject(bench)} is {times(over)} as fast as the published tree of {rows}.")
    return found


def doubts(plan: Plan, benches: Mapping[int, Benchmark] | None = None, *, batch_size: int | None = None) -> list[str]:
    """What there is against a plan's trees, each sentence once, with the batch sizes that it is for.

    benches    : batch size -> its benchmark, where the latencies were timed; the others go by the prediction
    batch_size : of this one alone
    """
    entries = plan.entries if batch_size is None else (plan.entry(batch_size),)
    found: dict[str, list[str]] = {}
    for entry in entries:
        for said in entry_doubts(plan, entry, (benches or {}).get(entry.batch_size)):
            found.setdefault(said, []).append(str(entry.batch_size))
    if len(entries) == 1 and not plan.mix:
        return list(found)
    each = [f"Batch size {', '.join(sizes)}: {said}" for said, sizes in found.items()]
    return [*(_mix_doubts(plan) if plan.mix else []), *each]


def entry_doubts(plan: Plan, entry: PlanEntry, bench: Benchmark | None) -> list[str]:
    """What there is against the tree of one of a plan's batch sizes: what was measured, or without that the prediction.

    bench : its benchmark; None where there is none, or where the latencies were timed elsewhere

    A mix is not judged by the prediction for one of its batch sizes, nor is it served without speculation there.
    """
    if bench is not None and speedup_over(bench, "plain") is not None:
        return [said.replace(ADVICE, "") if plan.mix else said for said in measured_doubts(bench)]
    return [] if plan.mix else predicted_doubts(entry)


def _mix_doubts(plan: Plan) -> list[str]:
    """What there is against one tree for a mix of loads, as it is predicted."""
    total = plan.total
    if total is None:
        return []
    if plan.entries[0].size == 1:
        return ["No tree pays over the mix: serve the model without speculation."]
    found, speedup = [], pm(total.speedup, total.speedup_stderr)
    error = 1.96 * (total.speedup_stderr or 0.0)
    if total.speedup + error < 1 or (not error and total.speedup <= 1):
        found.append(f"Speculation is predicted to lose over the mix ({speedup} times as fast){ADVICE}.")
    elif total.speedup - error <= 1:
        found.append(f"Speculation may not gain over the mix: its predicted speedup is {speedup}.")
    elif 1 in total.tied_sizes:
        found.append("Speculation may not gain over the mix: plain decoding is tied with the fastest tree.")
    slower = [f"{e.batch_size} ({pm(e.speedup, None)} times)" for e in plan.entries if e.speedup and e.speedup < 1]
    if slower:
        found.append(f"The one tree is predicted to be slower than plain decoding at batch size {', '.join(slower)}.")
    return found


def predicted_doubts(entry: PlanEntry) -> list[str]:
    """What a plan's entry says against its tree; of one that was verified, what decoding says.

    Empty where latencies are not known, or all speaks for it.
    """
    if entry.speedup is None:
        return []
    if entry.size == 1:
        return ["No tree pays here: serve the model without speculation."]
    if entry.verified and entry.verified.afresh.speedup:
        against = doubt(entry.verified.afresh.speedup)
        return [against] if against else []
    return list(_predicted_doubts(entry, entry.speedup))


def _predicted_doubts(entry: PlanEntry, speedup: float) -> Iterator[str]:
    ends = entry.interval95.speedup if entry.interval95 else None
    low, high = ends or (speedup, speedup)
    if high < 1 or (ends is None and speedup <= 1):
        yield f"Speculation is predicted to lose here ({pm(speedup, None)} times as fast){ADVICE}."
    elif low <= 1:
        yield (f"Speculation may not gain here: the 95 % interval of its predicted speedup is {low:.2f} to {high:.2f}.")
    elif 1 in entry.tied_sizes:
        yield "Speculation may not gain here: plain decoding is tied with the fastest tree."
    chain = entry.best_chain
    ends = entry.interval95.tokens_per_s if entry.interval95 else None
    if chain and chain.tokens_per_s and entry.tokens_per_s:
        ahead = chain.tokens_per_s / entry.tokens_per_s - 1
        if ahead > NEGLIGIBLE and (ends is None or chain.tokens_per_s > ends[1]):
            yield f"The chosen tree loses against a chain of {chain.depth}, which is predicted to be {ahead:.0%} faster."


def _rivals(bench: Benchmark) -> Iterator[tuple[str, bool]]:
    """What there is to say of each rival that the chosen tree does not beat, and whether it loses against it."""
    chosen, names = bench.contender(bench.judged), IN_ENGINE if bench.engine else RIVALS
    for rival in bench.contenders:
        if rival.size == 1 or rival.name == chosen.name or rival.medusa_choices == chosen.medusa_choices:
            continue
        over, name = bench.speedup(chosen.name, rival.name), names.get(rival.name, rival.name)
        if over is None or over.low is None or over.high is None:
            continue
        what = subject(bench) if chosen.size > 1 else "Plain decoding, which the plan chose,"
        if over.high < 1:
            yield f"{what} loses against {name}: it decodes {times(over)} as fast.", True
        elif over.low <= 1 and rival.name in (PUBLISHED, "chain") and not bench.engine:
            yield f"{what} is not shown to be faster than {name}: it decodes {times(over)} as fast.", False


def speedup_over(bench: Benchmark, baseline: str) -> Ratio | None:
    """Of the chosen tree, where both were measured."""
    known = {contender.name for contender in bench.contenders}
    return bench.speedup(bench.judged, baseline) if {bench.judged, baseline} <= known else None


def times(ratio: Ratio) -> str:
    """A ratio in a sentence.

    >>> times(Ratio(value=1.2, low=1.1, high=1.3)), times(Ratio(value=1.2, low=None, high=None))
    ('1.20 (1.10 to 1.30) times', '1.20 times')
    """
    ends = "" if ratio.low is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
    return f"{ratio.value:.2f}{ends} times"
