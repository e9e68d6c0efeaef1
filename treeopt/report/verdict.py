"""What a run found: whether speculation pays, in sentences for the terminal, the report and exports.

What speaks against it comes first.

chosen   the contender with the plan's draft
rivals   the other contenders, plain decoding aside
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from treeopt.files.shell import command_line
from treeopt.planning.select import NEGLIGIBLE
from treeopt.records.benchmark import Benchmark
from treeopt.records.figure import Ratio
from treeopt.records.plan import MixErrors
from treeopt.report.wording import count, pm

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from treeopt.records.plan import Plan, PlanEntry
    from treeopt.records.rundir import RunDirectory

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
NO_TREE_PAYS = "No tree pays here: serve the model without speculation."


def label(bench: Benchmark, name: str) -> str:
    """What a contender is called in tables. Other runtimes have other contenders, so that files may take more names."""
    if name == bench.judged != "chosen":
        return f"{name}, chosen by treeopt" if name == "dynamic" else f"{name}, for the plan's tree"
    return (IN_ENGINE if bench.engine else CONTENDERS).get(name, name)


def subject(bench: Benchmark) -> str:
    """The beginning of a sentence on the contender that is judged."""
    return {"chosen": "The chosen tree", "dynamic": "The dynamic tree"}.get(bench.judged, f"The {bench.judged}")


def outcome(speedup: Ratio | None) -> str:
    """What a measured speedup over plain decoding shows: a gain, a loss, neither, or that too little was timed.

    >>> outcome(None), outcome(Ratio(value=1.2)), outcome(Ratio(value=1.2, low=0.9, high=1.4))
    ('untimed', 'few', 'open')
    >>> outcome(Ratio(value=1.2, low=1.1, high=1.3)), outcome(Ratio(value=0.8, low=0.7, high=0.9))
    ('gain', 'loss')
    """
    if speedup is None:
        return "untimed"
    if speedup.low is None or speedup.high is None:
        return "few"
    return "loss" if speedup.high < 1 else "open" if speedup.low <= 1 else "gain"


def doubt(speedup: Ratio) -> str:
    """What to say first where a speedup over plain decoding is not shown to be above 1; empty where it is.

    >>> doubt(Ratio(value=1.2, low=1.1, high=1.3)), doubt(Ratio(value=0.8, low=0.7, high=0.9))
    ('', 'Speculation loses here: serve the model without it.')
    """
    return {
        "few": "Speculation is not shown to gain here: the prompts are too few for an interval.",
        "loss": f"Speculation loses here{ADVICE}.",
        "open": "Speculation is not shown to gain here: the 95 % interval of its speedup is "
        f"{speedup.low or 0:.2f} to {speedup.high or 0:.2f}.",
    }.get(outcome(speedup), "")


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
    total = plan.mix_speedup
    if total is None:
        return []
    if not plan.entries[0].speculates:
        return ["No tree pays over the mix: serve the model without speculation."]
    known = plan.mix_errors or MixErrors()
    found, speedup, error = [], pm(total, known.speedup), 1.96 * (known.speedup or 0.0)
    if total + error < 1 or (not error and total <= 1):
        found.append(f"Speculation is predicted to lose over the mix ({speedup} times as fast){ADVICE}.")
    elif total - error <= 1:
        found.append(f"Speculation may not gain over the mix: its predicted speedup is {speedup}.")
    elif 1 in known.tied_sizes:
        found.append("Speculation may not gain over the mix: plain decoding is tied with the fastest tree.")
    slower = [
        f"{e.batch_size} ({pm(e.chosen.speedup, None)} times)"
        for e in plan.entries
        if e.chosen.speedup and e.chosen.speedup < 1
    ]
    if slower:
        found.append(f"The one tree is predicted to be slower than plain decoding at batch size {', '.join(slower)}.")
    return found


def predicted_doubts(entry: PlanEntry) -> list[str]:
    """What a plan's entry says against its tree; of one that was verified, what decoding says.

    Empty where latencies are not known, or all speaks for it.
    """
    if entry.chosen.speedup is None:
        return []
    if entry.chosen.size == 1:
        return [NO_TREE_PAYS]
    if entry.verified and (ratio := entry.verified.afresh.speedup_ratio):
        against = doubt(ratio)
        return [against] if against else []
    return list(_predicted_doubts(entry, entry.chosen.speedup))


def _predicted_doubts(entry: PlanEntry, speedup: float) -> Iterator[str]:
    ends = entry.chosen.interval95.speedup
    low, high = ends or (speedup, speedup)
    if high < 1 or (ends is None and speedup <= 1):
        yield f"Speculation is predicted to lose here ({pm(speedup, None)} times as fast){ADVICE}."
    elif low <= 1:
        yield (f"Speculation may not gain here: the 95 % interval of its predicted speedup is {low:.2f} to {high:.2f}.")
    elif 1 in entry.tied_sizes:
        yield "Speculation may not gain here: plain decoding is tied with the fastest tree."
    chain = entry.best("chain")
    ends = entry.chosen.interval95.tokens_per_s
    if chain and chain.tokens_per_s and entry.chosen.tokens_per_s:
        ahead = chain.tokens_per_s / entry.chosen.tokens_per_s - 1
        if ahead > NEGLIGIBLE and (ends is None or chain.tokens_per_s > ends[1]):
            yield f"The chosen tree loses against a chain of {chain.depth}, which is predicted to be {ahead:.0%} faster."


def _rivals(bench: Benchmark) -> Iterator[tuple[str, bool]]:
    """What there is to say of each rival that the chosen tree does not beat, and whether it loses against it."""
    chosen, names = bench.contender(bench.judged), IN_ENGINE if bench.engine else RIVALS
    for rival in bench.contenders:
        if rival.size == 1 or rival.name == chosen.name or rival.draft == chosen.draft:
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
    """The chosen tree's speedup over a baseline; None where one of the two was not measured."""
    known = {contender.name for contender in bench.contenders}
    return bench.speedup(bench.judged, baseline) if {bench.judged, baseline} <= known else None


def times(ratio: Ratio) -> str:
    """A ratio in a sentence.

    >>> times(Ratio(value=1.2, low=1.1, high=1.3)), times(Ratio(value=1.2, low=None, high=None))
    ('1.20 (1.10 to 1.30) times', '1.20 times')
    """
    ends = "" if ratio.low is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
    return f"{ratio.value:.2f}{ends} times"


OWN_RUN = ("run", "--model", "MODEL", "--drafter", "HEADS", "--prompts", "prompts.jsonl", "--run", "my-run")
SHOWN = {  # how the sentence goes on
    "few": ", but the prompts are too few to show a gain",
    "loss": ", so not speculating is best",
    "open": ", which does not show a gain",
}


def ending(
    run: RunDirectory, plan: Plan, benches: Sequence[Benchmark], engines: Sequence[str], *, is_demo: bool
) -> tuple[str, str]:
    """What `treeopt run` says last: what was found and for what it holds, and the command to run next.

    benches : of each of the plan's entries
    engines : those that files were written for
    """
    each = [found(entry, bench) for entry, bench in zip(plan.entries, benches, strict=True)]
    if len(each) > 1:
        each = [f"at batch size {entry.batch_size} {said}" for entry, said in zip(plan.entries, each, strict=True)]
    result = f"Found: {'; '.join(each)}."
    if is_demo:
        meaning = "This holds for the demo model on this machine. Your own model and heads need a run of their own:"
        return f"{result} {meaning}", command_line(program(), *OWN_RUN)
    meaning, words = _next(plan, benches, engines)
    return f"{result} This holds for these prompts on this machine. {meaning}:", command_line(
        program(), *words, "--run", run.path
    )


def found(entry: PlanEntry, bench: Benchmark) -> str:
    """What a benchmark comes to at one batch size."""
    if not entry.speculates:
        return "no tree is predicted to beat plain decoding, so not speculating is the plan"
    speedup = speedup_over(bench, "plain")
    if speedup is None:
        return "nothing was timed, since the prompts are too few for a full batch"
    what = f"a {entry.draft.kind} of {count(entry.chosen.size, 'row')}".replace("a dynamic of", "a dynamic tree of")
    return f"{what} decodes {times(speedup)} as fast as plain decoding{SHOWN.get(outcome(speedup), '')}"


def _next(plan: Plan, benches: Sequence[Benchmark], engines: Sequence[str]) -> tuple[str, list[object]]:
    """Why, and the words of the next command for a model of one's own."""
    shown = {
        entry.batch_size: outcome(speedup_over(bench, "plain"))
        for entry, bench in zip(plan.entries, benches, strict=True)
        if entry.speculates
    }
    if engines and "gain" in shown.values():
        return f"To start {engines[0]} with it", ["export", "--to", engines[0]]
    for entry, bench in zip(plan.entries, benches, strict=True):
        if shown.get(entry.batch_size, "loss") not in ("gain", "loss"):
            prompts = len({answer.id for answer in bench.contenders[0].sequences})
            only = ["--batch-size", entry.batch_size] if len(plan.entries) > 1 else []
            return "More prompts may tell", ["bench", "--num-prompts", max(2 * prompts, 8), *only]
    return "For all figures in one page", ["report"]


def program() -> str:
    """What a shell calls treeopt by: its path, where it was started by that and is not found by its name."""
    called = sys.argv[0]
    return called if Path(called).name == "treeopt" and not shutil.which("treeopt") else "treeopt"
