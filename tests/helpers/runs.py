"""Runs that nobody measured: traces, profiles, benchmarks and whole run directories, for tests of what is shown of them."""

import shutil
import tempfile
from dataclasses import replace
from functools import cache

import numpy as np
from rich.console import Console

from tests.conftest import random_trace
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.benchmark import Benchmark
from treeopt.records.calibration import Calibration
from treeopt.records.contender import Answer, Block, Contender, Quality
from treeopt.records.estimate import Estimate
from treeopt.records.inputs import inputs_of
from treeopt.records.origins import Provenance
from treeopt.records.plan import Plan
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.trees.published import published_tree
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

NAMES = ["coding in Python, JavaScript and other languages of GitHub", "chat", "mathematics, step by step"]
NAMES += [
    "retrieval augmented generation",
    *["stem", "roleplay", "translation", "summarization", "writing", "extraction"],
]
NAMES += ["humanities", "multi-turn", "W" * 60]


def long_trace(heads: int, *, sequences: int = 24, ranks: int = 10, seed: int = 0) -> RankTrace:
    rng = np.random.default_rng(seed)
    trace = random_trace(rng, rng.integers(20, 60, sequences), heads, ranks)
    source = {"model": "organisation/some-model-7b-v1.3", "dtype": "bfloat16", "device": "cuda:0"}
    return replace(trace, meta={**trace.meta, "provenance": source})


def some_profile(batch_sizes, *, depth: int = 3, largest: int = 64) -> LatencyProfile:
    rng = np.random.default_rng(1)
    points, plain = [], []
    for b in batch_sizes:
        noise = rng.normal(1, 0.03, 9)
        plain.append(StepTiming(b, 512, 1, 0, tuple((3 + 0.1 * b) * noise)))
        for size in (s for s in (2, 4, 8, 16, 32, 64, 128, 256) if s <= largest):
            for d in {1, min(depth, size - 1)}:
                ms = 0.3 * d + 3 + 0.02 * b * size + 0.3
                points.append(StepTiming(b, 512, size, d, tuple(ms * noise)))
    runtime = {"name": "treeopt", "version": "0.1.0", "attention": "sdpa"}
    return LatencyProfile(tuple(points), tuple(plain), runtime)


@cache
def some_plan(batch_sizes: tuple[int, ...]) -> Plan:
    """Of ``long_trace(3)`` and ``some_profile``, made once: it takes seconds."""
    return plan_trees(long_trace(3), some_profile(batch_sizes), PlanRequest(Limits(16), batch_sizes=batch_sizes))


def some_bench(groups=("",), *, blocks: int = 6, batch_size: int = 1) -> Benchmark:
    rng = np.random.default_rng(2)
    where = [(g * blocks + i, group, r) for g, group in enumerate(groups) for i in range(blocks) for r in range(2)]

    def contender(name: str, tree: Tree, speed: float, accepted: list[int]) -> Contender:
        rate = 1 + sum(n * count for n, count in enumerate(accepted)) / 100
        steps, timed = round(50 / rate), []
        for prompt, group, r in where:
            seconds = 0.5 / speed * rng.uniform(0.9, 1.1)
            timed.append(Block(round=r, prompts=[prompt], tokens=50, steps=steps, group=group, decode_s=seconds))
        told = [
            Answer(id=str(p), steps=steps, tokens=51, identical=p > 0, group=group, replayed_steps=steps)
            for p, group, r in where
            if r == 0
        ]
        told[0] = replace(told[0], first_difference=2, logit_gap=0.01)
        guessed = {"replayed_accepted": [40, 40, 20], "predicted_accepted": [0.5, 0.25, 0.25], "accepted": accepted}
        predicted = {"predicted_tokens_per_step": Estimate(min(rate * 1.03, 1 + tree.depth))}
        kept = {"sequences": told, "blocks": timed, "passes": 105, **predicted, **guessed}
        return Contender(name=name, batch_size=batch_size, draft=tree, **kept)

    found = [
        contender("plain", Tree.chain(0), 1.0, [100]),
        contender("chosen", Tree.chain(2), 1.4, [50, 30, 20]),
        contender("mc_sim_7b_63", published_tree(), 0.8, [30, 30, 30, 10]),
        contender("a tree with a name as long as a file's may be", Tree.chain(3), 1.3, [40, 40, 20]),
    ]
    return Benchmark(contenders=tuple(found), dtype="bfloat16", prompts="held out")


def some_groups(heads: int, names) -> dict:
    rng = np.random.default_rng(3)
    hits = rng.integers(0, 50, (len(names), heads))
    return {
        name: {
            "hits": [[int(h), 1] for h in row],
            "trials": [60] * heads,
            "sequences": 5,
            "tokens_per_step": Estimate(2.0),
        }
        for name, row in zip(names, hits, strict=True)
    }


REJECT = {"rule": "rejection", "temperature": 0.7}
TYPICAL = {"rule": "typical", "temperature": 0.7, "epsilon": 0.09, "delta": 0.3}
JUDGED = {
    "log_likelihood_nats_per_token": Estimate(-0.845, 0.104),
    "reference_log_likelihood_nats_per_token": Estimate(-0.688, 0.1),
    "difference_nats_per_token": Estimate(-0.157, 0.062),
    "changed_answers_share": 1.0,
    "changed_tokens_share": 0.66,
}


def ruled(bench, acceptance):
    """As a benchmark under a rule; texts that depend on the tree are judged."""
    judged = acceptance["rule"] in ("rejection", "typical")
    quality = {contender.name: Quality(**JUDGED) for contender in bench.contenders} if judged else None
    bench = replace(bench, provenance=Provenance(acceptance=acceptance), quality=quality)
    if not judged:
        return bench
    changed = [replace(c, sequences=[replace(a, identical=False) for a in c.sequences]) for c in bench.contenders]
    return replace(bench, contenders=tuple(changed))


def at_speed(bench, speed):
    """The chosen tree that many times as fast as plain decoding, up to noise of the blocks."""
    plain, chosen, *others = bench.contenders
    steps = {(block.round, *block.prompts): block.steps for block in chosen.blocks}
    blocks = [
        replace(block, steps=steps[(block.round, *block.prompts)], decode_s=block.decode_s / speed)
        for block in plain.blocks
    ]
    return replace(bench, contenders=(plain, replace(chosen, blocks=blocks), *others))


def shown(renderable) -> str:
    """What the terminal shows, without its line breaks."""
    console = Console(width=160, markup=False)
    with console.capture() as capture:
        console.print(renderable)
    return " ".join(capture.get().split())


def make_run(folder, *, text="calm", batch_sizes=(1, 4), groups=("code", "chat")) -> RunDirectory:
    """Everything that a run can have; ``text`` is put wherever texts of users and data sets go."""
    shutil.copytree(whole_run(text, tuple(batch_sizes), tuple(groups)).name, folder, dirs_exist_ok=True)
    return RunDirectory(folder)


@cache
def whole_run(text, batch_sizes, groups) -> tempfile.TemporaryDirectory:
    """What ``make_run`` copies: its plan takes seconds."""
    folder = tempfile.TemporaryDirectory()
    run, trace, names = RunDirectory(folder.name), long_trace(4, sequences=24), [f"{group} {text}" for group in groups]
    drafter = {"kind": "medusa", "id": f"heads {text}", "num_heads": 4}
    source = {"model": f"model {text}", "revision": None, "dataset": f"prompts {text}.jsonl", "dtype": "float32"}
    source |= {"drafter": drafter, "device": f"cpu {text}", "versions": {"python": "3.11", "torch": text}}
    source |= {"machine": text, "command": f"treeopt calibrate {text}", "time": "2026-01-01T00:00:00Z"}
    meta = {**trace.meta, "provenance": source, "group_names": names, "drafter": drafter}
    meta |= {"skipped": [{"row": 7, "reason": f"empty {text}"}]}
    meta |= {"answers": {"given": True, "temperature": None, "is_estimate": True}}
    trace = replace(trace, meta=meta, group=np.arange(24) % len(names))
    calibration = Calibration.from_trace(trace, provenance=Provenance.of({"provenance": source}))
    profile = some_profile(batch_sizes)
    profile.info["provenance"] = {**source, "command": f"treeopt profile {text}"}
    trace.save(run.trace)
    calibration.save(run.calibration)
    profile.save(run.profile)
    plan = plan_trees(trace, profile, PlanRequest(Limits(24), batch_sizes=batch_sizes))
    warned = [replace(entry, warnings=[f"beware {text}"]) for entry in plan.entries]
    replace(plan, entries=tuple(warned), inputs=inputs_of(run.trace, run.profile)).save(run.plan)
    for batch_size in batch_sizes:
        bench = some_bench(names, batch_size=batch_size)
        contenders = (*bench.contenders[:-1], replace(bench.contenders[-1], name=f"mine {text}"))
        origin = Provenance.of({"provenance": {**source, "command": f"treeopt bench {text}"}})
        about = {"provenance": origin, "loop_share": 0.25}
        inputs = inputs_of(run.plan, run.trace)
        replace(bench, contenders=contenders, inputs=inputs, **about).save(run.bench_of(batch_size))
    return folder
