"""What a run found: whether speculation pays, in sentences for the terminal, the report and exports.

What speaks against it comes first.

chosen   the contender with the plan's draft
rivals   the other contenders, plain decoding aside
"""

from collections.abc import Sequence
from math import inf, log

from treeopt.files.shell import command_line
from treeopt.latency.costs import margins_of_error
from treeopt.latency.rounds import busy
from treeopt.records.benchmark import AS_IT_COMES, FEWEST_BLOCKS, FEWEST_LAUNCHES, Benchmark, block_prompts
from treeopt.records.estimate import NEGLIGIBLE, Estimate
from treeopt.records.plan import Plan, PlanEntry
from treeopt.records.profile import LatencyProfile
from treeopt.records.rundir import RunDirectory
from treeopt.report.wording import count
from treeopt.trees.draft import ANEW

PUBLISHED = "mc_sim_7b_63"
BY_DEFAULT = "the engine's default, plain"
CONTENDERS = {  # in a table, in a sentence
    "plain": ("plain decoding", "plain decoding"),
    AS_IT_COMES: (BY_DEFAULT, BY_DEFAULT),
    "chosen": ("chosen by treeopt", "the chosen tree"),
    PUBLISHED: (f"published {PUBLISHED}", "the published tree"),
    "chain": ("best top-1 chain", "the best chain"),
    "budget": ("best of full budget", "the best tree of the full budget"),
    "present": ("as it is served now", "what is served now"),
    "usual": ("the engine's usual setting", "the engine's usual setting"),
}
PLAIN = ("plain", AS_IT_COMES)
ADVICE = ": serve the model without speculation"
MOST_ANSWERS = 10_000  # that anybody would wait for
VERDICTS = {  # by what is shown of a speedup over plain decoding (`outcome`)
    "gain": "pays",
    "loss": "is slower than plain decoding",
    "open": "is not shown to pay",
    "few": "is not shown to pay",
}


def label(bench: Benchmark, name: str) -> str:
    """What a contender is called in tables."""
    known = CONTENDERS.get(name, (name, name))[0]
    if name == bench.judged != "chosen":
        return f"{known}, chosen by treeopt" if name in (*ANEW, *PLAIN) else f"{known}, for the plan's tree"
    return known


def subject(bench: Benchmark) -> str:
    """The beginning of a sentence on the contender that is judged."""
    if bench.judged == "chosen":
        return "The chosen setting" if bench.contender("chosen").draft.drafter else "The chosen tree"
    named = {
        "dynamic": "The dynamic tree",
        "ddtree": "The tree over marginals",
        **dict.fromkeys(PLAIN, "Plain decoding"),
    }
    return named.get(bench.judged, f"The {bench.judged}")


def outcome(speedup: Estimate | None) -> str:
    """What a measured speedup over plain decoding shows: a gain, a loss, neither, or that too little was timed.

    >>> outcome(None), outcome(Estimate(1.2)), outcome(Estimate(1.2, low=0.9, high=1.4))
    ('untimed', 'few', 'open')
    >>> outcome(Estimate(1.2, low=1.1, high=1.3)), outcome(Estimate(0.8, low=0.7, high=0.9))
    ('gain', 'loss')
    """
    if speedup is None or speedup.low is None or speedup.high is None:
        return "few" if speedup else "untimed"
    return "loss" if speedup.high < 1 else "open" if speedup.low <= 1 else "gain"


def doubt(speedup: Estimate, where: str = "here", *, is_predicted: bool = False) -> str:
    """What to say first where a speedup over plain decoding is not shown to be above 1; empty where it is.

    >>> doubt(Estimate(1.0, low=0.9, high=1.1), "over the mix", is_predicted=True)
    'Speculation is not shown to pay over the mix: the 95 % interval of its predicted speedup is 0.90 to 1.10.'
    """
    shown, predicted = outcome(speedup), "predicted " if is_predicted else ""
    if shown == "gain":
        return ""
    if shown == "loss":
        told = "predicted to be slower" if is_predicted else "slower"
        return f"Speculation is {told} than plain decoding {where}{ADVICE}."
    low, high = speedup.ends
    why = f"the 95 % interval of its {predicted}speedup is {low:.2f} to {high:.2f}"
    if shown == "few":
        why = (
            "the error of its predicted speedup is not known"
            if is_predicted
            else "too little was timed for an interval"
        )
    return f"Speculation {VERDICTS[shown]} {where}: {why}."


def slowdown(bench: Benchmark) -> Estimate | None:
    """The speedup of a draft that plain decoding was faster than, beyond noise or not; None of any other."""
    speedup = speedup_over(bench)
    return speedup if speedup and speedup < 1 and bench.contender(bench.judged).size > 1 else None


def pace(speedup: Estimate, beside: str = "plain decoding") -> str:
    """How a contender decodes beside plain decoding.

    >>> pace(Estimate(1.2)), pace(Estimate(0.9, low=0.8, high=1.1))
    ('decodes 1.20 times as fast as plain decoding', 'is slower than plain decoding: 0.90 (0.80 to 1.10) times as fast')
    """
    if speedup < 1:
        return f"is slower than {beside}: {times(speedup)} as fast"
    return f"decodes {times(speedup)} as fast as {beside}"


def timing_caveats(profile: LatencyProfile, remedy: str = "") -> list[str]:
    """What makes a profile's latencies unsure, in sentences; the ``remedy`` is what would make them sure."""
    caveats, wanted = list[str](), profile.info.get("precision")
    if wanted is not None:
        margins = margins_of_error(profile)
        missed = sum(margin > wanted for margin in margins)
        if missed:
            unknown = f"{missed} of {len(margins)} latencies are not known to {wanted:.1%} yet"
            caveats.append(f"{unknown}, the worst to {max(margins):.1%}{': ' if remedy else ''}{remedy}.")
    if is_busy := busy(profile.info.get("processor_share")):
        caveats.append(is_busy)
    return caveats


def decoding_caveats(bench: Benchmark) -> list[str]:
    """What makes a benchmark's figures unsure, in sentences: a busy machine, too little that was timed, what is not settled."""
    caveats, how = [busy(bench.processor_share), missing(bench)], ended(bench)
    if how:
        caveats.append(f"{how[0].upper()}{how[1:]}.")
    if bench.stopped:
        named = ", ".join(f"{label(bench, c.name)} after {count(c.compared, 'answer')}" for c in bench.stopped)
        caveats.append(f"Settled before: {named}.")
    if unsettled := {name: ratio for name, ratio in bench.unsettled.items() if ratio} if how else {}:
        named = ", ".join(f"{label(bench, name)}, {times(ratio)} as fast" for name, ratio in unsettled.items())
        caveats.append(f"Not settled: the chosen setting beside {named}.")
        wanted = float(f"{bench.contenders[0].compared * max(map(_times_as_many, unsettled.values())):.2g}")
        caveats.append(f"Some {wanted:,.0f} answers might settle it." if wanted < MOST_ANSWERS else None)
    return [*filter(None, caveats)]


def ended(bench: Benchmark) -> str:
    """Why decoding ended; empty where it goes on to the end in any case, since its rounds are launches or nothing is judged."""
    if bench.is_launched or bench.judged not in [contender.name for contender in bench.contenders]:
        return ""
    answers = count(bench.contenders[0].compared, "answer")
    if not bench.unsettled:
        return f"settled after {answers}"
    if bench.time_limit_s is not None:
        return f"stopped at the limit of {bench.time_limit_s:g} s, after {answers}"
    return f"ended with the last prompt, after {answers}"


def _times_as_many(ratio: Estimate) -> float:
    """How many times as many answers might settle a ratio; infinity where it has no interval."""
    if ratio.low is None or ratio.high is None:
        return inf
    return (log(ratio.high / ratio.low) / 2 / max(abs(log(ratio)), NEGLIGIBLE)) ** 2


def missing(bench: Benchmark) -> str:
    """What is missing for intervals; empty where nothing is."""
    first = bench.contenders[0]
    if bench.is_launched and bench.rounds < FEWEST_LAUNCHES:
        return f"{bench.rounds} of the {FEWEST_LAUNCHES} launches that intervals need were made."
    if len({tuple(block.prompts) for block in first.blocks}) >= FEWEST_BLOCKS:
        return ""
    size = first.batch_size
    needed = FEWEST_BLOCKS + size - 1 if bench.is_launched else FEWEST_BLOCKS * block_prompts(size)
    return (
        f"At batch size {size} {count(first.compared, 'prompt')} {'makes' if first.compared == 1 else 'make'} fewer than "
        f"{FEWEST_BLOCKS} blocks: {needed} are needed for intervals."
    )


def weighed(bench: Benchmark) -> tuple[list[str], list[str]]:
    """What a benchmark says against the chosen tree: plain decoding is as fast, a rival is faster; and how it stands to
    the rivals that it does not lose against: the fastest, a chain that it ties, the published tree.

    Two empty lists where nothing was timed.
    """
    if (speedup := speedup_over(bench)) is None:
        return [], []
    chosen, against, ties, won = bench.contender(bench.judged), list[str](), list[str](), list[str]()
    beginning = "Plain decoding, which the plan chose,"
    if chosen.size > 1:
        beginning = subject(bench)
        against += filter(None, [doubt(speedup)])
    rivals = [rival for rival in bench.contenders if rival.size > 1 and rival.draft != chosen.draft]
    ratios = {rival.name: ratio for rival in rivals if (ratio := bench.speedup(chosen.name, rival.name))}
    for name, ratio in sorted(ratios.items(), key=lambda pair: pair[1]):
        called, is_fastest = CONTENDERS.get(name, (name, name))[1], ratio == min([1.0, *ratios.values()])
        if outcome(ratio) == "loss":
            against.append(f"{beginning} loses against {called}: it decodes {times(ratio)} as fast.")
        elif is_fastest and ratio < 1:
            ties.append(
                f"The fastest is {called}, not beyond noise: {beginning[0].lower()}{beginning[1:]} decodes {times(ratio)} as fast."
            )
        elif bench.engine or name not in (PUBLISHED, "chain") or ratio.low is None:
            continue
        elif outcome(ratio) == "open":
            ties.append(f"{beginning} is not shown to be faster than {called}: it decodes {times(ratio)} as fast.")
        else:
            rows = f" of {bench.contender(name).size} rows" if name == PUBLISHED else ""
            won.append(f"{beginning} is {times(ratio)} as fast as {called}{rows}.")
    return against, ties + won


def measured(bench: Benchmark) -> str:
    """What a benchmark comes to, in sentences; what speaks against the chosen tree is the first."""
    if (speedup := speedup_over(bench)) is None:
        timed = bench.contenders[0].tokens_per_s is not None
        return "" if timed else "Nothing was timed: the prompts are too few for a full batch."
    (against, standing), size = weighed(bench), bench.contender(bench.judged).size
    result = f"{subject(bench)} ({count(size, 'row')} a step) {pace(speedup, over(bench))}."
    return " ".join([*against, result if size > 1 else "The plan does not speculate at this batch size.", *standing])


def speedup_over(bench: Benchmark) -> Estimate | None:
    """The chosen tree's speedup over plain decoding; None where one of the two was not measured."""
    known = {contender.name for contender in bench.contenders}
    return bench.speedup(bench.judged) if {bench.judged, bench.baseline} <= known else None


def over(bench: Benchmark | None) -> str:
    """What speedups of a benchmark are over, in a sentence."""
    return BY_DEFAULT if bench and bench.baseline == AS_IT_COMES else "plain decoding"


def times(ratio: Estimate) -> str:
    """A ratio in a sentence.

    >>> times(Estimate(1.2, low=1.1, high=1.3)), times(Estimate(1.2))
    ('1.20 (1.10 to 1.30) times', '1.20 times')
    """
    ends = "" if ratio.low is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
    return f"{ratio:.2f}{ends} times"


OWN_RUN = ("run", "--model", "MODEL", "--drafter", "HEADS", "--prompts", "prompts.jsonl", "--run", "my-run")
ENDS = {
    "few": ": it is not shown to pay, for too little was timed",
    "loss": ", so not speculating is best",
    "open": ": it is not shown to pay",
    "gain": "",
}


def ending(
    run: RunDirectory, plan: Plan, benches: Sequence[Benchmark], engines: Sequence[str], *, is_demo: bool
) -> tuple[str, str]:
    """What `treeopt run` says last: what was found and for what it holds, and the command to run next.

    benches : of each of the plan's entries
    engines : those that files were written for
    """
    pairs = list(zip(plan.entries, benches, strict=True))
    findings = [_finding(entry, bench) for entry, bench in pairs]
    if len(pairs) > 1:
        findings = [f"at batch size {entry.batch_size} {_finding(entry, bench)}" for entry, bench in pairs]
    holds, (why, words) = "these prompts", _next(pairs, engines)
    words += ["--run", run.path]
    if is_demo:
        holds, why, words = "the demo model", "Your own model and heads need a run of their own", [*OWN_RUN]
    found = f"Found: {'; '.join(findings)}. This holds for {holds} on this machine."
    return f"{found} {why}:", command_line("treeopt", *words)


def _finding(entry: PlanEntry, bench: Benchmark) -> str:
    if not entry.speculates:
        return "no tree is shown to pay, so not speculating is the plan"
    speedup = speedup_over(bench)
    if speedup is None:
        return "nothing was timed, since the prompts are too few for a full batch"
    kind = "dynamic tree" if entry.draft.kind == "dynamic" else entry.draft.kind
    end = "".join([ENDS[outcome(speedup)], f" ({how})" if (how := ended(bench)) else ""])
    return f"a {kind} of {count(entry.chosen.size, 'row')} {pace(speedup, over(bench))}{end}"


def _next(pairs: Sequence[tuple[PlanEntry, Benchmark]], engines: Sequence[str]) -> tuple[str, list[object]]:
    """Why, and the words of the next command for a model of one's own."""
    shown = [(entry, bench, outcome(speedup_over(bench))) for entry, bench in pairs if entry.speculates]
    if engines and "gain" in [result for *_, result in shown]:
        return f"To start {engines[0]} with it", ["export", "--to", engines[0]]
    for entry, bench, result in shown:
        if result not in ("gain", "loss"):
            prompts = len({answer.id for answer in bench.contenders[0].sequences})
            more: list[object] = ["--num-prompts", max(2 * prompts, 8)]
            if bench.time_limit_s is not None:
                more = ["--time-limit", f"{4 * bench.time_limit_s:g}"]
            size = ["--batch-size", entry.batch_size] if len(pairs) > 1 else []
            return "More prompts may tell", ["bench", *more, *size]
    return "For all figures in one page", ["report"]
