"""Find the best speculation tree for Medusa-style decoding, and prove it by real decoding.

    trace = treeopt.calibrate("MODEL", drafter="HEADS", prompts="prompts.jsonl")
    profile = treeopt.profile("MODEL", drafter="HEADS", batch_sizes=[1, 4, 8])
    plan = treeopt.search(trace, profile, budget=64)
    plan[4].tree.medusa_choices
    plan.plot("throughput")
    plan.export("tensorrt-llm", "out/")
    treeopt.bench(plan)

Every parameter is an option of the command of that name, which is made of the function. A model's options, those of
`treeopt.open`, go with every function that loads one; to load it once, open it and pass what you got:

    session = treeopt.open("MODEL", drafter="HEADS", prompts="prompts.jsonl")
    trace = treeopt.calibrate(session)

``run`` is the run directory, as --run: results are kept there, and what a function needs and is not given is read
there. Results show themselves in a notebook. Importing treeopt is quick; a function imports what it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Literal

from treeopt.errors import InvalidInput, OutOfRange, TreeoptError, Unsupported
from treeopt.files.parameters import Count, Natural, Positive, Range, declared, parameters_of
from treeopt.records import display
from treeopt.runtime.settings import ModelOptions

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Unpack

    from treeopt.arms.arm import Arms
    from treeopt.arms.gate import Gate as Gate
    from treeopt.growth.score import Score as Score
    from treeopt.planning.compared import Compared as Compared
    from treeopt.planning.compared import Comparison
    from treeopt.planning.compared import DraftersCompared as DraftersCompared
    from treeopt.planning.compared import GroupsCompared as GroupsCompared
    from treeopt.records.benchmark import Benchmark as Benchmark
    from treeopt.records.calibration import Calibration as Calibration
    from treeopt.records.inputs import Result
    from treeopt.records.plan import Plan as Plan
    from treeopt.records.probe import Probe as Probe
    from treeopt.records.profile import LatencyProfile as LatencyProfile
    from treeopt.records.requestlog import RequestLog as RequestLog
    from treeopt.records.rundir import RunDirectory as RunDirectory
    from treeopt.records.trace import RankTrace as RankTrace
    from treeopt.runtime.session import Session as Session
    from treeopt.trees.tree import Tree as Tree

__version__ = "0.1.0"
RUN = "treeopt-run"
# Where the types of results are; each is imported when it is asked for.
TYPES = {
    "RankTrace": "records.trace", "Probe": "records.probe", "Calibration": "records.calibration",
    "LatencyProfile": "records.profile", "Plan": "records.plan", "Benchmark": "records.benchmark",
    "RequestLog": "records.requestlog", "RunDirectory": "records.rundir", "Score": "growth.score", "Compared": "planning.compared",
    "GroupsCompared": "planning.compared", "DraftersCompared": "planning.compared", "Session": "runtime.session",
    "Tree": "trees.tree", "Gate": "arms.gate",
}  # fmt: skip
FUNCTIONS = ("open", "calibrate", "profile", "search", "bench", "compare", "score", "load")
__all__ = [*FUNCTIONS, *TYPES, "InvalidInput", "OutOfRange", "TreeoptError", "Unsupported"]


@declared
def open(
    model: str | Path | None = None, *, run: str | Path | RunDirectory = RUN, **options: Unpack[ModelOptions]
) -> Session:
    """Load a model with its drafter and prompts, once for several steps.

    options : see `treeopt.runtime.settings.ModelOptions`

    Raises InvalidInput where they do not belong together.
    """
    from treeopt import pipeline
    from treeopt.records.rundir import RunDirectory

    return pipeline.session_of(RunDirectory.of(run), model, options)


open.__doc__ = f"{open.__doc__}\n    {ModelOptions.__doc__}"


@declared
def calibrate(
    model: str | Path | Session | None = None,
    *,
    run: str | Path | RunDirectory = RUN,
    num_prompts: Count = 128,
    max_new_tokens: Count = 128,
    batch_size: Count = 16,
    ranks: Annotated[int, Range(1, 10_000)] = 32,
    topks: Sequence[Annotated[int, Range(1, 10)]] = (2, 4, 8),
    shard: str | None = None,
    overwrite: bool = False,
    engine: Literal["ray"] | None = None,
    workers: Count | None = None,
    gpus_per_worker: Annotated[float, Range(0)] | None = None,
    address: str | None = None,
    from_logs: str | Path | None = None,
    tokenizer: str | Path | None = None,
    **options: Unpack[ModelOptions],
) -> RankTrace | Probe | RequestLog:
    """Measure at which rank the drafter has the token that really comes: the trace, kept in the run directory.

    Under typical acceptance it is a probe, which is decoded with a tree. With ``from_logs`` it is what was asked and answered.

    num_prompts     : prompts to answer; a quarter of them all is held out for bench at least
    max_new_tokens  : longest answer
    batch_size      : sequences decoded at once
    ranks           : ranks to tell apart
    topks           : nodes that dynamic trees expand on each level, to be recorded: numbers from 1 to 10
    shard           : measure every 8th block of prompts only, from the 2nd on: 2/8; treeopt merge joins the shards
    overwrite       : replace another measurement of the run, which is kept otherwise
    engine          : have workers of a Ray cluster answer
    workers         : workers, each with the model; by default 1
    gpus_per_worker : GPUs of each worker; by default 0
    address         : HOST:PORT of a running cluster, or auto; by default one on this machine
    from_logs       : file of requests that were answered, for drafters that copy text; no model is run
    tokenizer       : folder with the model's tokenizer.json, for logs that have texts
    options         : those of `open`, on top of those that the run was calibrated with
    """
    asked = {**locals(), **options}
    from dataclasses import replace

    from treeopt import pipeline
    from treeopt.records.merging import WHOLE, Shard
    from treeopt.records.pools import USUAL
    from treeopt.records.rundir import RunDirectory

    run, on = RunDirectory.of(run), {"workers": workers, "gpus_per_worker": gpus_per_worker, "address": address}
    if from_logs is not None or tokenizer is not None:
        return pipeline.calibrate_from_logs(run, asked, parameters_of(calibrate))
    with run.writing(), pipeline.cluster_of(engine, **on) as cluster:
        session = pipeline.session_of(run, model, options, cluster=cluster, overwrite=overwrite)
        session = replace(session, shard=Shard.of(shard) if shard else WHOLE)
        counts = replace(USUAL, top_k=ranks, topks=tuple(sorted(set(topks))))
        limits = {"num_prompts": num_prompts, "max_new_tokens": max_new_tokens, "batch_size": batch_size}
        pipeline.calibrate(run, session, counts=counts, overwrite=overwrite, **limits)
        return run.read_probe() if run.probe.exists() else run.read_trace()


@declared
def profile(
    model: str | Path | Session | None = None,
    *,
    run: str | Path | RunDirectory = RUN,
    batch_sizes: Sequence[Count] = (1,),
    contexts: Sequence[Count] = (),
    sizes: Sequence[Count] | None = None,
    budget: Count = 64,
    precision: Annotated[float, Range(0, above=True, percent=True)] = 0.02,
    time_limit_s: Positive = 60,
    calibration: str | None = None,
    compiled: bool = False,
    engine: str | None = None,
    overwrite: bool = False,
    **options: Unpack[ModelOptions],
) -> LatencyProfile:
    """Time real decoding steps with trees of chosen sizes and depths, and plain ones; kept in the run directory.

    Batch sizes and contexts are added to what the run's profile knows of the same model.

    batch_sizes  : sequences decoded at once: 1,4,8
    contexts     : hold rows at these lengths: 512,4096; by default the prompts'
    sizes        : time exactly these tree sizes, root included; by default sizes at the edges of tiles
    budget       : largest tree size to time, root included
    precision    : wanted margin of error of every latency: half of its 95 % interval
    time_limit_s : seconds in all, for all batch sizes and contexts
    calibration  : calibration that timed trees are grown on: a file or a name; by default the run's
    compiled     : compile the target (on CUDA with CUDA graphs)
    engine       : time another runtime's own steps, with chains and dynamic trees: openvino, openvino-int8, either with -default;
                   vllm
    overwrite    : replace a profile of another model, machine or runtime, which is kept otherwise
    options      : those of `open`, on top of those that the run was calibrated with
    """
    asked = dict(locals())
    from treeopt import pipeline

    return pipeline.with_session(pipeline.profile, **asked)


@declared
def search(
    calibration: RankTrace | Calibration | Probe | str | Path | None = None,
    profile: LatencyProfile | str | Path | None = None,
    *,
    run: str | Path | RunDirectory | None = None,
    budget: Count = 64,
    batch_sizes: Sequence[Count] | Mapping[int, float] | None = None,
    context: Count | None = None,
    engine: str | None = None,
    method: str | None = None,
    shape: str | None = None,
    max_rank: Natural | None = None,
    max_depth: Count | None = None,
    measured_only: bool = False,
) -> Plan:
    """Choose the tree with the best throughput for each batch size, or for all with their shares: {1: 0.7, 8: 0.3}.

    >>> plan = search("vicuna-7b-medusa1", budget=8)
    >>> plan[1].tree.medusa_choices
    [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]

    calibration : a trace, a calibration, or the name of a shipped one (treeopt list); by default the run's
    profile     : a profile, or the name of a shipped one; by default the run's
    run         : the run directory, which gets the plan; not read or written where a calibration is passed without it
    budget      : most rows verified per sequence and step, root included
    batch_sizes : sequences decoded at once: 1,4,8. With shares, 1:0.5,4:0.3,8:0.2, one tree for all: a share is of the time
                  that the server decodes so many at once, not of requests or tokens; by default the profile's
    context     : tokens that a sequence has; by default as in the trace
    engine      : plan what this engine can take (treeopt list engines)
    method      : one of the engine's ways to speculate; by default the drafter's
    shape       : shape of trees: sibling-closed or chain; by default what the engine takes
    max_rank    : largest rank of a node; by default 9, or the engine's
    max_depth   : deepest node; by default the number of heads
    measured_only : choose among sizes that were timed, without estimates between
    """
    asked = dict(locals())
    from treeopt import pipeline

    return pipeline.search_in_memory(**asked, default=RUN)


@declared
def bench(
    plan: Plan | None = None,
    model: str | Path | Session | None = None,
    *,
    run: str | Path | RunDirectory = RUN,
    batch_size: Count | None = None,
    num_prompts: Count | None = None,
    max_new_tokens: Count | None = None,
    rounds: Count | None = None,
    engine: str | None = None,
    trees: Sequence[str | Path] = (),
    launch: str | None = None,
    lengths: Sequence[Natural] = (),
    clients: Sequence[Count] = (1,),
    time_limit_s: Positive | None = None,
    present: str | None = None,
    within_s: Positive = 900,
    **options: Unpack[ModelOptions],
) -> Benchmark | Arms:
    """Decode held-out prompts for real, with the chosen tree, plain decoding and others; kept in the run directory.

    A run of a log is proved by an engine: it decodes requests of the log plainly, as planned and as usual, each up to its limit.
    With ``lengths`` no plan is needed: the result is what a server reaches with each.

    plan           : becomes the run's; by default it is the run's
    batch_size     : which of the plan's; by default its first
    num_prompts    : held-out prompts; by default 64, or 10 a row
    max_new_tokens : longest answer; by default as calibrated
    rounds         : times that every contender decodes every prompt; by default 1, or 3 launches
    engine         : have another runtime decode: transformers, openvino, openvino-int8, either with -default; with ``launch``
                     whose server it is: vllm, llama-cpp, with ``lengths`` also sglang; by default the command says it
    trees          : add a tree: a file, or the name of a published one
    launch         : have servers answer that this command starts, with {options} and {port} filled in; at all of the plan's
                     batch sizes, of which the first is returned. With ``lengths`` it is your own command with {port}
    lengths        : launch each number of guesses per step, 0 for none, and repeat the launches that are worth it: 0,2,4,8
    clients        : with ``lengths``, how many prompts are answered at once: 1,4,16
    time_limit_s   : with ``lengths``, seconds of all launches together
    present        : with ``launch``, the options of speculation that you serve with now, in place of {options}
    within_s       : with ``launch``, seconds that a server may take to be healthy
    options        : those of `open`, on top of those that the run was calibrated with
    """
    asked = dict(locals())
    from treeopt import pipeline
    from treeopt.records.rundir import RunDirectory

    directory = RunDirectory.of(run)
    if plan is not None:
        with directory.writing():
            plan.save(directory.plan)
    if launch is not None:
        with directory.writing():
            return (pipeline.bench_lengths if lengths else pipeline.bench_plan)(directory, asked, options)
    if lengths:
        raise InvalidInput("`lengths` are those of a server that `launch` starts: pass its command.")
    for name in ("plan", "launch", "lengths", "clients", "time_limit_s", "present", "within_s"):
        del asked[name]
    return pipeline.with_session(pipeline.bench, **{**asked, "run": directory})


@declared
def compare(
    first: str | Path | RunDirectory | Result,
    *others: str | Path | RunDirectory | Result,
    profile: LatencyProfile | str | Path | None = None,
    batch_size: Count | None = None,
    budget: Count = 64,
    tolerance: Annotated[float, Range(0, 99.9)] | None = None,
    noise: Positive | None = None,
    group_by: Literal["context"] | None = None,
) -> Comparison:
    """Say whether a plan is still right for other traffic; of one run which groups would gain by a plan of their own.

    Of two measurements without a plan, counters or settings that were run: whether what is served got slower.

    >>> found = compare("vicuna-7b-medusa1", "vicuna-7b-medusa1", budget=8)
    >>> found.keep, len(found.moved), round(found.losses[0].served.tokens_per_step, 2)
    (True, 0, 2.04)

    first, others : run directories, results, files of them, or shipped names; the last may be what an engine counted, in
                    several files. Run directories of several drafters are compared by what their plans reach
    profile       : a profile, or the name of a shipped one; by default the first source's, or the second's
    batch_size    : only of this batch size; by default all of the plan's
    budget        : most rows, where the first source has no plan and one is made
    tolerance     : per cent that may be lost; by default 0.5 by a plan or a group, 5 between two measurements
    noise         : how far two launches of one setting differ, as a standard deviation in per cent; by default what repeats say, else 2.5 %
    group_by      : of one run: compare contexts, by powers of two, instead of groups of prompts
    """
    from treeopt import pipeline

    return pipeline.compare(
        first,
        *others,
        profile=profile,
        batch_size=batch_size,
        budget=budget,
        tolerance=tolerance,
        noise=noise,
        group_by=group_by,
    )


@declared
def score(
    tree: Tree | str | Path,
    calibration: RankTrace | Calibration | str | Path | None = None,
    *,
    run: str | Path | RunDirectory = RUN,
    batch_size: Count | None = None,
) -> Score:
    """Say what a tree reaches, and how far it is from the best tree of its size.

    >>> round(score("mc_sim_7b_63", "vicuna-7b-medusa1").given.tokens_per_step, 2)
    2.34

    tree        : a tree, a file in any format that treeopt reads, or the name of a published one
    calibration : a trace, a calibration, or the name of a shipped one (treeopt list); by default the run's
    batch_size  : which of a plan's trees, where ``tree`` is a file with a plan
    """
    from treeopt import pipeline
    from treeopt.records.rundir import RunDirectory

    return pipeline.score(RunDirectory.of(run), tree, calibration=calibration, batch_size=batch_size)


def load(path: str | Path) -> Result:
    """Read a file of a run directory, or the shipped file of that name, as the result that it holds.

    >>> load("vicuna-7b-medusa1").num_heads
    5
    """
    from treeopt.records.inputs import load_result

    return load_result(path)


def _viewer() -> Any:
    from treeopt.pipeline import notebook

    return notebook


display.register(_viewer)


def __getattr__(name: str) -> Any:
    if name not in TYPES:
        raise AttributeError(f"module 'treeopt' has no attribute {name!r}")
    return getattr(import_module(f"treeopt.{TYPES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
