"""The steps of the line, each reading the run directory and writing one file to it.

calibrate -> trace.npz, calibration.json · profile -> profile.json · search -> plan.json ·
bench -> bench.json · export -> export/
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treeopt import library
from treeopt.calibration import Calibration
from treeopt.console import note, progress
from treeopt.errors import InvalidInput, OutOfRange
from treeopt.growth import MAX_RANK, grow, grow_independent
from treeopt.latency import LatencyProfile
from treeopt.plan import Plan, PlanEntry
from treeopt.planner import crossfit, plan_trees
from treeopt.replay import replay
from treeopt.rundir import RunDirectory, digests
from treeopt.storage import load_json
from treeopt.trace import RankTrace
from treeopt.tree import Tree, TreeFamily

if TYPE_CHECKING:
    from treeopt.benchmark import Benchmark
    from treeopt.runtime.prompts import Prompt
    from treeopt.runtime.session import Session

SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)  # rows that a profile measures
# Shape of published Medusa-1 accuracies, used to make trees for timing where nothing was calibrated.
TYPICAL_ACCEPT = np.outer(0.55 * 0.6 ** np.arange(8), 0.45 ** np.arange(MAX_RANK + 1))


def calibrate(
    run: RunDirectory,
    session: Session,
    *,
    num_prompts: int,
    max_new_tokens: int,
    batch_size: int = 16,
    top_k: int = 32,
    source: dict[str, Any] | None = None,
) -> Calibration:
    """Measure the heads' ranks on the session's first prompts."""
    prompts = _first(session, num_prompts, reserved=1)
    trace = _collect(session, prompts, max_new_tokens, batch_size=batch_size, top_k=top_k,
                     title="Calibrating", source=source)  # fmt: skip
    calibration = Calibration.from_trace(trace)
    trace.save(run.trace)
    calibration.save(run.calibration)
    return calibration


def _first(session: Session, num_prompts: int, *, reserved: int = 0) -> tuple[Prompt, ...]:
    if num_prompts < 1:
        raise InvalidInput(f"--num-prompts must be at least 1, but got {num_prompts}.")
    prompts = session.prompts.prompts
    if len(prompts) <= reserved:
        raise InvalidInput(
            f"--prompts must leave some for bench, but {session.prompts.name} has {len(prompts)}."
        )
    most = len(prompts) - (max(1, len(prompts) // 4) if reserved else 0)
    if reserved and num_prompts > most:
        note(f"Calibrating on {most} of {len(prompts)} prompts; the rest are held out for bench.")
    return prompts[: min(num_prompts, most)]


def _collect(
    session: Session,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    *,
    batch_size: int,
    top_k: int,
    title: str,
    source: dict[str, Any] | None = None,
) -> RankTrace:
    from treeopt.runtime.collect import collect_trace
    from treeopt.runtime.session import GREEDY

    if max_new_tokens < 1:
        raise InvalidInput(f"--max-new-tokens must be at least 1, but got {max_new_tokens}.")
    meta = {
        "drafter": session.drafter,
        "acceptance": GREEDY,
        "provenance": session.provenance().record(),
        "source": source,
    }
    with progress(title, len(prompts)) as advance:
        return collect_trace(
            session.target,
            session.heads,
            prompts,
            batch_size=batch_size,
            stop=session.stop(max_new_tokens),
            top_k=top_k,
            meta=meta,
            progress=lambda tokens: advance(1),
        )


def profile(
    run: RunDirectory,
    session: Session,
    *,
    batch_sizes: Sequence[int],
    sizes: Sequence[int] = SIZES,
    time_limit_s: float = 60.0,
    max_new_tokens: int = 128,
) -> LatencyProfile:
    """Time decoding steps with trees of each size and depth at each batch size."""
    from treeopt.runtime.timing import measure_steps

    if min([*batch_sizes, *sizes]) < 1:
        raise InvalidInput("--batch-size and --sizes must be at least 1.")
    trees = timing_trees(run, session.heads.num_heads, sizes)
    prompts = session.prompts.prompts[:64]
    points, plain = [], []
    share = time_limit_s / len(batch_sizes)
    for batch_size in sorted(set(batch_sizes)):
        with progress(f"Timing {len(trees)} trees, batch size {batch_size}", share) as advance:
            timings, reference = measure_steps(
                session.target,
                session.heads,
                prompts,
                trees,
                batch_size=batch_size,
                stop=session.stop(max_new_tokens),
                time_limit_s=share,
                progress=advance,
            )
        points += timings
        plain.append(reference)
    info = {"measures": "step", "provenance": session.provenance(seed=0).record()}
    result = LatencyProfile(tuple(points), tuple(plain), session.runtime(), info)
    result.save(run.profile)
    return result


def timing_trees(run: RunDirectory, num_heads: int, sizes: Sequence[int]) -> list[Tree]:
    """Trees of the wanted sizes for every depth, and a chain of each depth to begin from.

    They are the run's own trees where it has a trace, else those of typical accuracies: what a step
    costs depends on size and depth, hardly on the shape.
    """
    trace = run.read_trace() if run.trace.exists() else None
    budget = max(sizes)
    trees = {Tree.chain(depth) for depth in range(1, min(num_heads, budget - 1) + 1)}
    for depth in range(1, num_heads + 1):
        family = _family(trace, budget, depth) if budget > 1 else None
        for size in sizes:
            if family is not None and 1 < size <= len(family):
                tree = family.tree(size)
                if tree.depth == depth:
                    trees.add(tree)
    return sorted(trees, key=lambda tree: (len(tree), tree.depth))


def _family(trace: RankTrace | None, budget: int, depth: int) -> TreeFamily:
    if trace is None:
        return grow_independent(TYPICAL_ACCEPT, budget=budget, max_depth=depth)
    return grow(trace, objective="replay", budget=budget, max_depth=depth, max_rank=MAX_RANK)


def search(
    run: RunDirectory,
    *,
    batch_sizes: Sequence[int],
    budget: int,
    max_rank: int = MAX_RANK,
    max_depth: int | None = None,
    objective: str = "replay",
    calibration: str | None = None,
    profile_path: str | None = None,
) -> Plan:
    """Choose the best tree per batch size from the run's trace, or from a calibration by path or name."""
    source: RankTrace | Calibration
    if calibration is not None:
        used = library.find("calibration", calibration)
        source = RankTrace.load(used) if used.suffix == ".npz" else Calibration.load(used)
    elif run.trace.exists() or not run.calibration.exists():
        used, source = run.trace, run.read_trace()
    else:
        used, source = run.calibration, run.read_calibration()
    latencies, files = None, [used]
    if profile_path is not None:
        files.append(library.find("profiles", profile_path))
        latencies = LatencyProfile.load(files[-1])
    elif run.profile.exists() and calibration is None:
        files.append(run.profile)
        latencies = run.read_profile()
    with progress("Searching", None):
        plan = plan_trees(source, latencies, batch_sizes=batch_sizes, budget=budget, max_rank=max_rank,
                          max_depth=max_depth, objective=objective, inputs=digests(*files))  # fmt: skip
    plan.save(run.plan)
    return plan


def bench(
    run: RunDirectory,
    session: Session,
    *,
    batch_size: int | None = None,
    num_prompts: int | None = None,
    max_new_tokens: int | None = None,
    rounds: int = 2,
    trees: Sequence[Path] = (),
    on_trace: bool = False,
) -> Benchmark:
    """Decode for real with every contender; held-out prompts unless ``on_trace``."""
    from treeopt.runtime.timing import run_benchmark

    if rounds < 1:
        raise InvalidInput(f"--rounds must be at least 1, but got {rounds}.")
    plan, trace = run.read_plan(), run.read_trace()
    entry = plan.entries[0] if batch_size is None else plan.entry(batch_size)
    drafter = trace.meta.get("drafter") or {}
    if drafter.get("sha256") not in (None, session.drafter["sha256"]):
        raise InvalidInput(
            f"The run's trace must be of the heads that bench decodes with, but {run.trace} is of "
            f"{drafter.get('id')}. Calibrate again, or use another --run."
        )
    contenders, predicted = _contenders(plan, entry, trace, session.heads.num_heads)
    for file in trees:
        if file.stem in contenders:
            raise InvalidInput(
                f"Contenders need names of their own, but {file.stem!r} is taken: rename {file}."
            )
        contenders[file.stem] = tree = read_tree(file)
        predicted[file.stem] = _predicted(trace, tree)
    # Ranks that the trace does not tell apart would be misses in replay, but decoding accepts them.
    top_k = max(trace.top_k, *(1 + max(tree.ranks) for tree in contenders.values() if tree))
    limit = max_new_tokens or trace.meta.get("max_new_tokens", 128)
    reference = None
    if on_trace:
        prompts = _trace_prompts(session, trace)
        dtype = (trace.meta.get("provenance") or {}).get("dtype")
        same = dtype == session.provenance().dtype and limit == trace.meta.get("max_new_tokens")
        if same and top_k == trace.top_k:
            reference = trace
        else:
            note(f"The trace is in {dtype}, with fewer ranks or other limits: measuring its prompts again.")
    else:
        hashes = trace.meta.get("prompt_sha256")
        if hashes is None:
            raise InvalidInput(
                f"Held-out prompts need to know those of the trace, but {run.trace} has no prompt_sha256."
            )
        wanted = num_prompts or max(24, 10 * entry.batch_size)
        prompts = _first(replace(session, prompts=session.prompts.without(hashes)), wanted)
    if reference is None:
        reference = _collect(session, prompts, limit, batch_size=16, top_k=top_k,
                             title="Plain answers of the bench prompts")  # fmt: skip
    total = len(prompts) * len(contenders) * rounds
    with progress(f"Decoding with {len(contenders)} contenders", total) as advance:
        result = run_benchmark(
            session.target, session.heads, prompts, contenders, reference,
            batch_size=entry.batch_size, stop=session.stop(limit), rounds=rounds, predicted=predicted,
            info={"prompts": "trace" if on_trace else "held out", "max_new_tokens": limit,
                  "loop_share": reference.loop_share(), "inputs": digests(run.plan, run.trace),
                  "provenance": session.provenance(seed=0).record()},
            progress=advance,
        )  # fmt: skip
    result.save(run.bench)
    if len(plan.entries) > 1:  # the last run's is bench.json; each batch size keeps its own
        result.save(run.bench.with_name(f"bench-batch-size-{entry.batch_size}.json"))
    return result


def _trace_prompts(session: Session, trace: RankTrace) -> tuple[Prompt, ...]:
    known = {prompt.sha256: prompt for prompt in session.prompts.prompts}
    wanted = trace.meta.get("prompt_sha256") or []
    missing = [sha for sha in wanted if sha not in known]
    if missing or not wanted:
        raise InvalidInput(
            f"--prompts trace needs the prompts that the trace was measured on, but {len(missing)} of "
            f"{len(wanted)} are not in {session.prompts.name}."
        )
    return tuple(known[sha] for sha in wanted)


def _contenders(
    plan: Plan, entry: PlanEntry, trace: RankTrace, num_heads: int
) -> tuple[dict[str, Tree | None], dict[str, float | None]]:
    """Who is decoded, and the tokens per step that the calibration predicts for each.

    A fixed tree's replay on the calibration prompts is not in-sample; the grown ones are cross-fitted.
    """
    limits = {"budget": entry.size, "max_rank": MAX_RANK, "max_depth": num_heads, "gap_free": True}
    limits |= {name: value for name, value in (plan.constraint or {}).items() if name in limits}
    published = library.published_tree().cut(max_depth=num_heads)
    whole = crossfit(trace, objective=plan.objective or "replay", **limits)
    chain = Tree.chain((entry.best_chain or {}).get("depth", num_heads))
    trees: dict[str, Tree | None] = {
        "plain": None,
        "chosen": entry.tree if entry.size > 1 else None,
        "mc_sim_7b_63": published,
        "chain": chain,
        "budget": whole.family.tree(len(whole.family)),
    }
    return trees, {
        "plain": 1.0,
        "chosen": entry.tokens_per_step,
        "mc_sim_7b_63": _predicted(trace, published),
        "chain": _predicted(trace, chain),
        "budget": float(whole.tokens_per_step[-1]),
    }


def _predicted(trace: RankTrace, tree: Tree) -> float | None:
    """Tokens per step of a fixed tree on the trace; None where it has ranks that the trace lacks."""
    return None if max(tree.ranks) >= trace.top_k else replay(trace, tree).tokens_per_step


def read_tree(path: Path) -> Tree:
    """A tree from JSON: a list of paths, or an object with ``medusa_choices``."""
    document = load_json(path)
    if isinstance(document, dict):
        document = document.get("medusa_choices")
    if not isinstance(document, list) or not all(isinstance(choice, list) for choice in document):
        raise InvalidInput(f"{path} must hold a list of paths, or an object with 'medusa_choices'.")
    try:
        return Tree.from_choices(document)
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from None


def export(
    run: RunDirectory, engine: str, *, batch_size: int | None = None
) -> tuple[list[Path], tuple[str, ...]]:
    """Write the engine's files for one entry of the plan: (files, notes)."""
    from treeopt.export import export_entry
    from treeopt.storage import write_text

    plan = run.read_plan()
    entry = plan.entry(batch_size)
    num_heads = (plan.drafter or {}).get("num_heads")
    if not isinstance(num_heads, int):
        raise OutOfRange("The export needs the number of heads, but the plan has no drafter.num_heads.")
    result = export_entry(entry, engine, num_heads=num_heads)
    paths = []
    folder = run.export / engine
    if len(plan.entries) > 1:
        folder /= f"batch-size-{entry.batch_size}"
    for name, text in result.files.items():
        paths.append(folder / name)
        write_text(paths[-1], text)
    return paths, result.notes
