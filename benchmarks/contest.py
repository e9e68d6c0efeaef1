"""What was planned beside settings that a user might try, decoded on held-out prompts: predicted, replayed and measured.

    python benchmarks/contest.py RUN [--engine openvino] [--engine-python PATH] [--batch-size 4] [--num-prompts 240]

RUN is a run directory with a plan: `treeopt calibrate`, `profile` and `search` make it, with the same engine. For a run of a log of
requests the settings are those of OpenVINO's drafter that copies text. A benchmark that was stopped goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

import numpy as np

from treeopt.files.provenance import machine
from treeopt.files.writing import discard
from treeopt.growth.grow import grow
from treeopt.growth.replay import replay, tells
from treeopt.latency.costs import StepCosts
from treeopt.pipeline import contest
from treeopt.pipeline.bench import asked_prompts, held_out
from treeopt.pipeline.copied import tried_on
from treeopt.pipeline.entrants import Entrant, plain_and_chosen, rivals
from treeopt.pipeline.logged import copied_entrants, prompts_of, some_requests, tried_drafts
from treeopt.pipeline.session import session_of_run
from treeopt.records.benchmark import AS_IT_COMES, IDLE, Benchmark
from treeopt.records.estimate import Estimate
from treeopt.records.options import Source
from treeopt.records.origins import OURS
from treeopt.records.plan import Plan, PlanEntry
from treeopt.records.requestlog import RequestLog
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.report.verdict import PUBLISHED
from treeopt.runtime.engines import open_stepper
from treeopt.runtime.stepper import Stepper
from treeopt.trees.draft import DDTree, Draft, DynamicTree
from treeopt.trees.published import published_tree
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

CHAINS, TREE_ROWS = range(1, 9), (6, 10, 16, 24)
TREES = ((2, 2, 5), (2, 4, 9), (3, 2, 7), (3, 4, 11), (4, 2, 9), (4, 4, 16), (5, 8, 24))
COPIED = tuple(product((2, 4, 8, 16), (2, 3, 8)))  # guesses, longest n-gram
TITLE = "setting | tokens/step predicted | replayed | measured | off % | step cost predicted | speedup predicted | measured | same text"


def tried(entry: PlanEntry, trace: RankTrace, stepper: Stepper) -> dict[str, Entrant]:
    """Plain decoding, what was planned, and what a user might try."""
    entrants, heads = {**plain_and_chosen(entry), **rivals(entry)}, trace.num_heads
    drafts: list[Draft] = [Tree.chain(length) for length in CHAINS if length <= heads]
    if stepper.takes_trees and entry.batch_size == 1:
        drafts += [DynamicTree(*setting) for setting in TREES if setting[0] <= heads and trace.pools]
    if stepper.name == OURS:
        grown = grow(trace, Limits(max(TREE_ROWS), heads))
        drafts += [grown.tree(rows) for rows in TREE_ROWS] + [published_tree().cut(max_depth=heads)]
        drafts += [DDTree(heads, 4, rows) for rows in TREE_ROWS if trace.marginals]
    elif stepper.twin:
        entrants[AS_IT_COMES if stepper.as_it_comes else IDLE] = replace(entrants["plain"], stepper=stepper.twin)
    for draft in drafts:
        if draft not in {entrant.draft for entrant in entrants.values()}:
            rate = Estimate(replay(trace, draft).tokens_per_step) if tells(trace, draft) else None
            name = f"tree of {len(draft)}" if draft.kind == "tree" else draft.name
            entrants[PUBLISHED if draft == published_tree().cut(max_depth=heads) else name] = Entrant(draft, rate)
    is_ours = not stepper.about
    return {name: replace(one, is_replayable=is_ours or len(one.draft) == 1) for name, one in entrants.items()}


def copied(plan: Plan, entry: PlanEntry, log: RequestLog, stepper: Stepper) -> dict[str, Entrant]:
    """Plain decoding, what was planned, the usual setting, and others of OpenVINO's."""
    settings, every = dict(tried_drafts(plan, entry, log)), [np.ones(log.num_conversations, bool)]
    for length, longest in COPIED:
        options = (("max_ngram_size", longest), ("num_assistant_tokens", length))
        (candidate,) = tried_on(log, ("openvino:prompt-lookup", options, "cold", None), every)
        if candidate.draft not in [other.draft for other in settings.values()]:
            settings[f"{length}, n to {longest}"] = candidate
    return copied_entrants(entry, settings, stepper)


def lines(result: Benchmark, entrants: Mapping[str, Entrant], costs: StepCosts) -> Iterator[str]:
    """A row for each contender, and what the planned setting loses against the fastest of all."""
    yield f"| {TITLE} |\n|{'---|' * (1 + TITLE.count('|'))}"
    for contender in result.contenders:
        rate, replayed = entrants[contender.name].predicted, contender.replayed_tokens_per_step
        cost = float(costs.ms([contender.draft.cost])[0]) / costs.plain.ms
        cells = (
            contender.name,
            "–" if rate is None else f"{rate:.3f}",
            "–" if replayed is None else f"{replayed:.3f}",
            f"{contender.rate_of():.3f}"
            + (f" (settled after {contender.compared})" if contender in result.stopped else ""),
            "–" if rate is None else f"{100 * (rate / contender.tokens_per_step - 1):+.1f}",
            f"{cost:.3f}",
            "–" if rate is None else f"{rate / cost:.2f}",
            result.speedup(contender.name),
            f"{contender.identical}/{contender.compared}",
        )
        yield f"| {' | '.join(map(str, cells))} |"
    speedups = {contender.name: result.speedup(contender.name) for contender in result.contenders}
    speeds = {name: speedup.value for name, speedup in speedups.items() if speedup}
    best = max(speeds, key=lambda name: speeds[name])
    yield f"\nThe fastest is {best}; chosen loses {1 - speeds['chosen'] / speeds[best]:.1%} against it.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--engine")
    parser.add_argument("--engine-python")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--num-prompts", type=int, default=240)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    asked = parser.parse_args()
    run = RunDirectory(asked.run)
    session, plan = session_of_run(run, Source(), asked.engine), run.read_plan()
    entry, folder = plan.entry(asked.batch_size), run.partial(f"contest-{asked.engine or OURS}-{asked.batch_size}")
    if run.requests.exists():
        log = some_requests(run.read_requests(), asked.num_prompts, asked.max_new_tokens, session.target.context)
        session = replace(session, limits={tuple(one.prompt): one.limit or 0 for one in log.requests()})
        prompts = sorted(prompts_of(log), key=lambda prompt: prompt.cluster)
    else:
        conversations = held_out(run, session, run.read_trace(), asked.num_prompts)
        prompts = asked_prompts(session, conversations, asked.max_new_tokens, folder)
    stepper = open_stepper(asked.engine, session.setup(asked.max_new_tokens), asked.engine_python)
    entrants = copied(plan, entry, log, stepper) if run.requests.exists() else tried(entry, run.read_trace(), stepper)
    origin = session.provenance(seed=0)
    result = contest(stepper, entrants, prompts, batch_size=asked.batch_size, folder=folder, origin=origin)
    print(
        f"\n{origin.model}, {origin.dtype}, {stepper.name} {stepper.version}, batch size {asked.batch_size}, {machine()}.\n"
    )
    costs = StepCosts(run.read_profile(), asked.batch_size, entry.context_tokens)
    print("\n".join(lines(result, entrants, costs)), flush=True)
    discard(folder)


if __name__ == "__main__":
    main()
