"""Find the best speculation tree for Medusa-style decoding, and prove it by real decoding.

    trace = treeopt.calibrate("MODEL", drafter="HEADS", prompts="prompts.jsonl")
    profile = treeopt.profile("MODEL", drafter="HEADS", batch_sizes=[1, 4, 8])
    plan = treeopt.search(trace, profile, budget=64)
    plan[4].tree.medusa_choices
    plan.plot("throughput")
    plan.export("tensorrt-llm", "out/")
    treeopt.bench(plan)

Names, defaults and errors are those of the commands, which call these functions. A model's options, those of
`treeopt.open`, go with every function that loads one; to load it once, open it and pass what you got:

    session = treeopt.open("MODEL", drafter="HEADS", prompts="prompts.jsonl")
    trace = treeopt.calibrate(session)

``run`` is the run directory, as --run: results are kept there, and what a function needs and is not given is read
there. Results show themselves in a notebook. Importing treeopt is quick; a function imports what it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from treeopt.errors import InvalidInput, OutOfRange, TreeoptError, Unsupported
from treeopt.records import display

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Unpack

    from treeopt.growth.score import Score as Score
    from treeopt.pipeline.session import ModelOptions
    from treeopt.planning.compared import Compared as Compared
    from treeopt.planning.compared import DraftersCompared as DraftersCompared
    from treeopt.planning.compared import GroupsCompared as GroupsCompared
    from treeopt.records.benchmark import Benchmark as Benchmark
    from treeopt.records.calibration import Calibration as Calibration
    from treeopt.records.load import Result
    from treeopt.records.plan import Plan as Plan
    from treeopt.records.probe import Probe as Probe
    from treeopt.records.profile import LatencyProfile as LatencyProfile
    from treeopt.records.rundir import RunDirectory as RunDirectory
    from treeopt.records.trace import RankTrace as RankTrace
    from treeopt.runtime.session import Session as Session
    from treeopt.trees.tree import Tree as Tree

__version__ = "0.1.0"
RUN = "treeopt-run"
TYPES = {
    "RankTrace": "treeopt.records.trace",
    "Probe": "treeopt.records.probe",
    "Calibration": "treeopt.records.calibration",
    "LatencyProfile": "treeopt.records.profile",
    "Plan": "treeopt.records.plan",
    "Benchmark": "treeopt.records.benchmark",
    "RunDirectory": "treeopt.records.rundir",
    "Score": "treeopt.growth.score",
    "Compared": "treeopt.planning.compared",
    "GroupsCompared": "treeopt.planning.compared",
    "DraftersCompared": "treeopt.planning.compared",
    "Session": "treeopt.runtime.session",
    "Tree": "treeopt.trees.tree",
}  # each is imported when it is asked for
FUNCTIONS = ("open", "calibrate", "profile", "search", "bench", "compare", "score", "load")
__all__ = [*FUNCTIONS, *TYPES, "InvalidInput", "OutOfRange", "TreeoptError", "Unsupported"]


def open(
    model: str | Path | None = None, *, run: str | Path | RunDirectory = RUN, **options: Unpack[ModelOptions]
) -> Session:
    """Load a model with its drafter and prompts, once for several steps.

    model       : folder or hub id of the target; the run's, or the demo, by default
    drafter     : folder, file or hub id of heads or of a draft model; "mtp"; "ngram"; "early-exit:LAYER"
    prompts     : a file, a folder, a datasets id, or "demo"; column, group_by, responses, split, chat_template
                  say how it is read; they are shuffled by ``seed``, groups spread evenly, or taken ``in_order``
    dtype, device, device_map, revision, trust_remote_code : how the model is loaded
    threads     : that a CPU computes with; by default the run's, or as few as bring something
    acceptance  : "greedy", "sample", "reject" or "typical"; temperature, top_p, top_k, seed, epsilon, delta are its own
    draft_depth : guesses in a row of a drafter that makes chains

    Raises InvalidInput where they do not belong together.
    """
    from treeopt import pipeline
    from treeopt.records.rundir import RunDirectory

    return pipeline.session_of(RunDirectory.of(run), model, options)


def calibrate(
    model: str | Path | Session | None = None,
    *,
    run: str | Path | RunDirectory = RUN,
    num_prompts: int = 128,
    max_new_tokens: int = 128,
    batch_size: int = 16,
    ranks: int = 32,
    topks: Sequence[int] = (2, 4, 8),
    shard: str | None = None,
    overwrite: bool = False,
    engine: str | None = None,
    workers: int | None = None,
    gpus_per_worker: float | None = None,
    address: str | None = None,
    journal: str | None = None,
    **options: Unpack[ModelOptions],
) -> RankTrace | Probe:
    """Measure at which rank the drafter has the token that really comes: the trace, kept in the run directory.

    Under typical acceptance it is a probe, which is decoded with a tree.

    num_prompts    : prompts to answer; a quarter of them all is held out for bench at least
    max_new_tokens : longest answer
    batch_size     : sequences decoded at once
    ranks          : ranks to tell apart
    topks          : of the dynamic trees to record: nodes that they expand on each level, 1 to 10; none for fixed trees alone
    shard          : "2/8" measures every 8th block of prompts, from the second on; `treeopt merge` joins the shards
    overwrite      : replace another measurement of the run, which is kept otherwise
    engine         : "ray" has ``workers`` processes of a Ray cluster answer, each with ``gpus_per_worker`` GPUs; ``address``
                     is HOST:PORT of a running cluster, ``journal`` an fsspec URL where the hosts share no disk
    options        : of `open`, on top of those that the run was calibrated with
    """
    from dataclasses import replace

    from treeopt import pipeline
    from treeopt.records.pools import Counts
    from treeopt.records.rundir import RunDirectory
    from treeopt.records.shards import WHOLE, Shard
    from treeopt.trees.dynamic import MOST_LEVELS

    directory, part = RunDirectory.of(run), WHOLE if shard is None else Shard.of(shard)
    on = {"workers": workers, "gpus_per_worker": gpus_per_worker, "address": address, "journal": journal}
    with directory.writing(), pipeline.cluster_of(engine, **on) as cluster:
        session = pipeline.session_of(
            directory, model, options, overwrite=overwrite, num_prompts=num_prompts, cluster=cluster
        )
        pipeline.calibrate(
            directory,
            replace(session, shard=part),
            num_prompts=num_prompts,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            counts=Counts(ranks, MOST_LEVELS, tuple(sorted(set(topks)))),
            overwrite=overwrite,
        )
        return directory.read_probe() if directory.probe.exists() else directory.read_trace()


def profile(
    model: str | Path | Session | None = None,
    *,
    run: str | Path | RunDirectory = RUN,
    batch_sizes: Sequence[int] = (1,),
    contexts: Sequence[int] = (),
    sizes: Sequence[int] | None = None,
    budget: int = 64,
    precision: float = 0.02,
    time_limit_s: float = 60,
    calibration: str | None = None,
    gb_per_s: float | None = None,
    compiled: bool = False,
    engine: str | None = None,
    overwrite: bool = False,
    **options: Unpack[ModelOptions],
) -> LatencyProfile:
    """Time real decoding steps with trees of chosen sizes and depths, and plain ones; kept in the run directory.

    Batch sizes and contexts are added to what the run's profile knows of the same model.

    contexts     : hold rows at these lengths [tokens]; by default they are as long as the prompts make them
    sizes        : time exactly these tree sizes, root included; by default they are placed up to ``budget``
    precision    : share of a latency that its 95 % interval may be wide to either side
    time_limit_s : for all batch sizes and contexts together
    calibration  : what timed trees are grown on, a file or a name; by default the run's
    gb_per_s     : memory bandwidth to compare plain steps with
    compiled     : compile the target (on CUDA with CUDA graphs)
    engine       : time another runtime's own steps, with chains and dynamic trees: "openvino" or "openvino-int8"
    overwrite    : replace a profile of another model, machine or runtime, which is kept otherwise
    options      : of `open`, on top of those that the run was calibrated with
    """
    from treeopt import pipeline
    from treeopt.records.rundir import RunDirectory

    directory = RunDirectory.of(run)
    with directory.writing():
        session = pipeline.session_of(directory, model, options)
        asked: dict[str, Any] = {"batch_sizes": batch_sizes, "budget": budget, "precision": precision}
        asked |= {"time_limit_s": time_limit_s, "overwrite": overwrite}
        ours: dict[str, Any] = {"contexts": contexts, "sizes": sizes, "calibration": calibration, "gb_per_s": gb_per_s}
        if engine is not None:
            return pipeline.profile_in(directory, session, engine, ours={**ours, "compiled": compiled}, **asked)
        with pipeline.compiled(session, compiled):
            return pipeline.profile(directory, session, **asked, **ours)


def search(
    calibration: RankTrace | Calibration | Probe | str | Path | None = None,
    profile: LatencyProfile | str | Path | None = None,
    *,
    run: str | Path | RunDirectory | None = None,
    budget: int = 64,
    batch_sizes: Sequence[int] | Mapping[int, float] | None = None,
    context: int | None = None,
    engine: str | None = None,
    method: str | None = None,
    shape: str | None = None,
    max_rank: int | None = None,
    max_depth: int | None = None,
    objective: str = "replay",
    measured_only: bool = False,
    sample: int | None = None,
    verify: int = 0,
    for_groups: str = "shared",
) -> Plan:
    """Choose the tree with the best throughput for each batch size.

    >>> plan = search("vicuna-7b-medusa1", budget=8)
    >>> plan[1].tree.medusa_choices
    [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]

    calibration : a result of `calibrate`, a file, or the name of a shipped one; by default the run's
    profile     : a result of `profile`, a file, or the name of a shipped one; by default the run's
    run         : the run directory, which gets the plan; not read or written where a calibration is passed without it
    budget      : most rows verified per sequence and step, root included
    batch_sizes : a tree for each; or {1: 0.7, 8: 0.3}, one tree for a mix of loads; by default the profile's
    context     : tokens that a sequence has; by default as in the trace
    engine      : plan what this engine can take, by ``method``, one of its ways to speculate
    shape, max_rank, max_depth : other limits on trees; objective: "independent", "joint" or "replay"
    measured_only : choose among sizes that were timed, without estimates between
    sample      : plan with so many conversations of a trace, drawn at random; by default with all
    verify      : decode for real with so many of the best sizes, and take the fastest
    for_groups  : "shared"; "minimax", the plan least bad for the worst group; "own", beside the shared one a plan for each
                  group, in run directories in groups/ of the run's
    """
    from treeopt import pipeline

    options = pipeline.SearchOptions(
        budget=budget,
        batch_sizes=batch_sizes,
        context=context,
        engine=engine,
        method=method,
        shape=shape,
        max_rank=max_rank,
        max_depth=max_depth,
        objective=objective,
        measured_only=measured_only,
        sample=sample,
        for_groups=for_groups,
    )
    return pipeline.search_on(calibration, profile, run, options, default=RUN, verify=verify)


def bench(
    plan: Plan | None = None,
    model: str | Path | Session | None = None,
    *,
    run: str | Path | RunDirectory = RUN,
    batch_size: int | None = None,
    num_prompts: int | None = None,
    max_new_tokens: int | None = None,
    rounds: int = 1,
    trees: Sequence[str | Path] = (),
    engine: str | None = None,
    **options: Unpack[ModelOptions],
) -> Benchmark:
    """Decode held-out prompts for real, with the chosen tree, plain decoding and others; kept in the run directory.

    plan           : becomes the run's; by default it is the run's
    batch_size     : which of the plan's; by default its first
    num_prompts    : by default 24, or 10 a row
    max_new_tokens : longest answer; by default as calibrated
    rounds         : times that every contender decodes every prompt
    trees          : more contenders: files, or names of published trees
    engine         : another runtime that decodes: "transformers" with chains, "openvino" or "openvino-int8" with chains
                     and dynamic trees
    options        : of `open`, on top of those that the run was calibrated with; prompts="trace" decodes those of
                     the run's own trace
    """
    from treeopt import pipeline
    from treeopt.records.rundir import RunDirectory

    directory = RunDirectory.of(run)
    on_trace = options.get("prompts") == "trace"
    if on_trace and engine is not None:
        raise InvalidInput("--engine decodes held-out prompts, but got --prompts trace.")
    if on_trace:
        del options["prompts"]
    with directory.writing():
        if plan is not None:
            plan.save(directory.plan)
        session = pipeline.session_of(directory, model, options)
        asked = {"batch_size": batch_size, "num_prompts": num_prompts, "max_new_tokens": max_new_tokens}
        if engine is not None:
            return pipeline.bench_in(directory, session, engine, rounds=rounds, trees=trees, **asked)
        return pipeline.bench(directory, session, rounds=rounds, trees=trees, on_trace=on_trace, **asked)


def compare(
    first: str | Path | RunDirectory | Result,
    *others: str | Path | RunDirectory | Result,
    profile: LatencyProfile | str | Path | None = None,
    batch_size: int | None = None,
    budget: int = 64,
    tolerance: float = 0.5,
    picture: str | Path | None = None,
) -> Compared | GroupsCompared | DraftersCompared:
    """Say whether a plan is still right for other traffic; of one run which groups would gain by a plan of their own.

    >>> found = compare("vicuna-7b-medusa1", "vicuna-7b-medusa1", budget=8)
    >>> found.keep, len(found.moved), round(found.losses[0].tokens_per_step, 2)
    (True, 0, 2.04)

    first, others : run directories, results, files of them, or shipped names; the last may be what an engine counted, in
                    several files. Run directories of several drafters are compared by what their plans reach
    profile       : a result of `profile`, a file, or the name of a shipped one; by default the first source's
    batch_size    : only this one
    budget        : most rows, where the first source has no plan and one is made
    tolerance     : per cent of the throughput that the plan may lose before it is time to plan anew
    picture       : a .png or .svg file of the comparison of drafters
    """
    from pathlib import Path

    from treeopt import pipeline

    found = pipeline.compare(first, *others, profile=profile, batch_size=batch_size, budget=budget, tolerance=tolerance)
    if picture is not None:
        pipeline.draw_picture(found, Path(picture))
    return found


def score(
    tree: Tree | str | Path,
    calibration: RankTrace | Calibration | str | Path | None = None,
    *,
    run: str | Path | RunDirectory = RUN,
    batch_size: int | None = None,
) -> Score:
    """Say what a tree reaches, and how far it is from the best tree of its size.

    >>> round(score("mc_sim_7b_63", "vicuna-7b-medusa1").given.rates.tokens_per_step, 2)
    2.34

    tree        : a tree, a file in any format that treeopt reads, or the name of a published one
    calibration : a trace, a calibration, a file, or the name of a shipped one; by default the run's
    batch_size  : which of a plan's trees, where ``tree`` is a file with a plan
    """
    from treeopt import pipeline
    from treeopt.records.rundir import RunDirectory

    return pipeline.score(RunDirectory.of(run), tree, calibration=calibration, batch_size=batch_size)


def load(path: str | Path) -> Result:
    """What a file of a run directory holds, or a shipped file of that name.

    >>> load("vicuna-7b-medusa1").num_heads
    5
    """
    from treeopt.records.load import load_result

    return load_result(path)


def _viewer() -> display.Viewer:
    from treeopt.pipeline import notebook

    return notebook


display.register(_viewer)


def __getattr__(name: str) -> Any:
    if name not in TYPES:
        raise AttributeError(f"module 'treeopt' has no attribute {name!r}")
    return getattr(import_module(TYPES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *TYPES})
