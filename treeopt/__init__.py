"""Find the best speculation tree for Medusa-style decoding, and prove it by real decoding.

    trace = treeopt.calibrate("MODEL", drafter="HEADS", prompts="prompts.jsonl")
    profile = treeopt.profile("MODEL", drafter="HEADS", batch_sizes=[1, 4, 8])
    plan = treeopt.search(trace, profile, budget=64)
    print(plan)
    plan[4].tree.medusa_choices
    plan.plot("throughput")
    plan.export("tensorrt-llm", "out/")
    treeopt.bench(plan)

A function takes what most people pass, and the rest as a class of options, whose fields are the options of the command of that
name. A model is loaded by each function that needs one; to load it once, open it and pass what you got:

    session = treeopt.open("MODEL", drafter="HEADS", prompts="prompts.jsonl")
    trace = treeopt.calibrate(session)

``run`` is the run directory, as --run: results are kept there, and what a function is not given is read there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from treeopt.errors import InvalidInput, OutOfRange, TreeoptError, Unsupported
from treeopt.files.options import with_given
from treeopt.records import display
from treeopt.records.exchange import ExportOptions, TableOptions, Watching
from treeopt.records.options import (
    BenchOptions,
    CalibrateOptions,
    CompareOptions,
    Model,
    ProfileOptions,
    Prompts,
    Server,
    TrainOptions,
    TreeLimits,
    Workers,
)

if TYPE_CHECKING:
    from pathlib import Path

    from treeopt.arms.arm import Arms as Arms
    from treeopt.arms.gate import Gate as Gate
    from treeopt.arms.tuned import TunedArms
    from treeopt.growth.score import Score as Score
    from treeopt.pipeline.contest import contest as contest
    from treeopt.pipeline.train import Training
    from treeopt.planning.compared import Compared as Compared
    from treeopt.planning.compared import Comparison
    from treeopt.planning.compared import DraftersCompared as DraftersCompared
    from treeopt.planning.compared import GroupsCompared as GroupsCompared
    from treeopt.records.benchmark import Benchmark as Benchmark
    from treeopt.records.calibration import Calibration as Calibration
    from treeopt.records.display import Exported
    from treeopt.records.inputs import Result
    from treeopt.records.plan import Plan as Plan
    from treeopt.records.probe import Probe as Probe
    from treeopt.records.profile import LatencyProfile as LatencyProfile
    from treeopt.records.requestlog import RequestLog as RequestLog
    from treeopt.records.rules import Rule as Rule
    from treeopt.records.rundir import RunDirectory as RunDirectory
    from treeopt.records.trace import RankTrace as RankTrace
    from treeopt.runtime.session import Session as Session
    from treeopt.runtime.training.recipe import Recipe as Recipe
    from treeopt.serving.watch import Tuned
    from treeopt.trees.tree import Tree as Tree

__version__ = "0.1.0"
RUN = "treeopt-run"
# Where the types of results are; each is imported when it is asked for.
TYPES = {
    "RankTrace": "records.trace", "Probe": "records.probe", "Calibration": "records.calibration",
    "LatencyProfile": "records.profile", "Plan": "records.plan", "Benchmark": "records.benchmark",
    "RequestLog": "records.requestlog", "RunDirectory": "records.rundir", "Score": "growth.score", "Compared": "planning.compared",
    "GroupsCompared": "planning.compared", "DraftersCompared": "planning.compared", "Session": "runtime.session",
    "Tree": "trees.tree", "Gate": "arms.gate", "contest": "pipeline.contest", "Arms": "arms.arm", "Rule": "records.rules", "Recipe": "runtime.training.recipe",
}  # fmt: skip
FUNCTIONS = (
    "open", "calibrate", "requests", "profile", "search", "bench", "tune", "compare", "score", "train", "export", "load",
)  # fmt: skip
OPTIONS = (
    "Model", "Prompts", "CalibrateOptions", "Workers", "ProfileOptions", "TreeLimits", "BenchOptions", "Server",
    "TableOptions", "Watching", "TrainOptions", "ExportOptions",
)  # fmt: skip
__all__ = [*FUNCTIONS, *TYPES, *OPTIONS, "InvalidInput", "OutOfRange", "TreeoptError", "Unsupported"]


def open(
    model: str | Path | Model | None = None,
    *,
    drafter: str | Path | None = None,
    prompts: str | Path | Prompts | None = None,
    rule: str | Rule | None = None,
    run: str | Path | RunDirectory = RUN,
) -> Session:
    """Load a model with its drafter and prompts, once for several steps.

    model   : folder, GGUF file or hub id of the target, or a `Model`; by default the run's, or the demo
    drafter : folder, file or hub id of heads or of a draft model, or a name (treeopt list drafters)
    prompts : file, folder or datasets id, or `Prompts`
    rule    : how guesses are accepted, "sample:temperature=0.7" or a `Rule`; by default greedy
    run     : options that are not given are those that this run directory was calibrated with

    Raises InvalidInput where they do not belong together.
    """
    from treeopt.pipeline.session import session_of, source_of

    return session_of(_opened(run), source_of(model, drafter, prompts, rule))


def calibrate(
    model: str | Path | Model | Session | None = None,
    *,
    drafter: str | Path | None = None,
    prompts: str | Path | Prompts | None = None,
    rule: str | Rule | None = None,
    num_prompts: int | None = None,
    max_new_tokens: int | None = None,
    run: str | Path | RunDirectory = RUN,
    options: CalibrateOptions | None = None,
) -> RankTrace | Probe:
    """Measure at which rank the drafter has the token that really comes: the trace, or under typical acceptance a probe.

    num_prompts    : prompts to answer, by default 128; a quarter of them all is held out for bench at least
    max_new_tokens : longest answer, by default 128
    options        : others. The other parameters are those of `open`
    """
    from treeopt.pipeline.calibrate import calibrate_run
    from treeopt.pipeline.session import source_of

    wanted = with_given(options or CalibrateOptions(), num_prompts=num_prompts, max_new_tokens=max_new_tokens)
    _, record = calibrate_run(_opened(run), source_of(model, drafter, prompts, rule), wanted)
    return record


def requests(
    log: str | Path,
    *,
    tokenizer: str | Path | None = None,
    columns: Prompts | None = None,
    run: str | Path | RunDirectory = RUN,
    overwrite: bool = False,
) -> RequestLog:
    """Read what a server was asked and answered, for drafters that copy text: token ids, kept in the run directory.

    log       : file of requests that were answered; no model is run
    tokenizer : folder with the model's tokenizer.json, for logs that have texts
    columns   : the log's column, responses and group_by, where their names are not known ones
    overwrite : replace another measurement of the run, which is kept otherwise
    """
    from treeopt.pipeline.logs import read_requests

    return read_requests(_opened(run), log, tokenizer, columns or Prompts(), overwrite=overwrite)


def profile(
    model: str | Path | Model | Session | None = None,
    *,
    drafter: str | Path | None = None,
    batch_sizes: Sequence[int] | None = None,
    contexts: Sequence[int] | None = None,
    time_limit_s: float | None = None,
    engine: str | None = None,
    run: str | Path | RunDirectory = RUN,
    options: ProfileOptions | None = None,
) -> LatencyProfile:
    """Time real decoding steps with trees of chosen sizes and depths, and plain ones; kept in the run directory.

    Batch sizes and contexts are added to what the run's profile knows of the same model.

    batch_sizes  : sequences decoded at once, by default 1
    contexts     : hold rows at these lengths [tokens]; by default the prompts'
    time_limit_s : seconds in all, by default 60
    engine       : time another runtime's own steps: openvino, openvino-int8, either with -default; vllm
    options      : others. The other parameters are those of `open`
    """
    from treeopt.pipeline.profile.timed import profile
    from treeopt.pipeline.session import session_of_run, source_of

    run = _opened(run)
    wanted = with_given(options or ProfileOptions(), batch_sizes=batch_sizes, contexts=contexts)
    wanted = with_given(wanted, time_limit_s=time_limit_s, engine=engine)
    with run.writing():
        session = session_of_run(run, source_of(model, drafter), wanted.engine)
        return profile(run, session, wanted)


def search(
    calibration: RankTrace | Calibration | Probe | str | Path | None = None,
    profile: LatencyProfile | str | Path | None = None,
    *,
    budget: int | None = None,
    batch_sizes: Sequence[int] | Mapping[int, float] | None = None,
    context: int | None = None,
    engine: str | None = None,
    run: str | Path | RunDirectory | None = None,
    limits: TreeLimits | None = None,
) -> Plan:
    """Choose the tree with the best throughput for each batch size, or for all with their shares: {1: 0.7, 8: 0.3}.

    >>> plan = search("vicuna-7b-medusa1", budget=8)
    >>> plan[1].tree.medusa_choices
    [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]

    calibration : a trace, a calibration, or the name of a shipped one (treeopt list); by default the run's
    profile     : a profile, or the name of a shipped one; by default the run's
    budget      : most rows verified per sequence and step, root included; by default 64
    batch_sizes : sequences decoded at once. With shares, one tree for all: a share is of the time that the server decodes so
                  many at once, not of requests or tokens; by default the profile's
    context     : tokens that a sequence has; by default as in the trace
    engine      : plan what this engine can take (treeopt list engines)
    run         : the run directory, which gets the plan; not read or written where a calibration is passed without it
    limits      : what trees may be chosen among
    """
    from treeopt.pipeline.search import search_in_memory
    from treeopt.records.options import SearchOptions

    wanted = with_given(SearchOptions(), budget=budget, batch_sizes=batch_sizes, context=context, engine=engine)
    return search_in_memory(calibration, profile, run=run, default=RUN, options=wanted, limits=limits or TreeLimits())


def bench(
    plan: Plan | None = None,
    model: str | Path | Model | Session | None = None,
    *,
    prompts: str | Path | Prompts | None = None,
    batch_size: int | None = None,
    num_prompts: int | None = None,
    engine: str | Server | None = None,
    run: str | Path | RunDirectory = RUN,
    options: BenchOptions | None = None,
) -> Benchmark | Arms:
    """Decode held-out prompts for real, with the chosen tree, plain decoding and others; kept in the run directory.

    A run of a log is proved by an engine: it decodes requests of the log plainly, as planned and as usual, each up to its limit.
    With a `Server` that has lengths no plan is needed: the result is what the server reaches with each.

    plan        : becomes the run's; by default it is the run's
    batch_size  : which of the plan's; by default its first
    num_prompts : held-out prompts; by default 64, or 10 a row
    engine      : have another runtime decode: transformers, openvino, openvino-int8, either with -default, vllm; or a `Server`
                  that is launched, at all of the plan's batch sizes, of which the first is returned
    options     : others. The other parameters are those of `open`
    """
    from treeopt.pipeline.proof import bench_run
    from treeopt.pipeline.session import source_of

    run = _opened(run)
    wanted = with_given(options or BenchOptions(), batch_size=batch_size, num_prompts=num_prompts)
    if plan is not None:
        with run.writing():
            plan.save(run.plan)
    server = engine if isinstance(engine, Server) else Server()
    if isinstance(engine, str):
        wanted = replace(wanted, engine=engine)
    return bench_run(run, source_of(model, None, prompts), wanted, server)


def tune(
    *sources: str | Path, run: str | Path | RunDirectory = RUN, options: Watching | TableOptions | None = None
) -> Tuned | TunedArms:
    """Say which setting to serve, by tables of settings that were run, or by a server that is up.

    sources : files of settings, by default the run's; or the URL of a server, which is watched while it serves
    options : how the server is watched, or how settings are decided among
    """
    from treeopt.pipeline.tune import tune_sources

    watching = options if isinstance(options, Watching) else Watching()
    table = options if isinstance(options, TableOptions) else TableOptions()
    return tune_sources(_opened(run), list(map(str, sources)), watching, table)


def compare(
    first: str | Path | RunDirectory | Result,
    *others: str | Path | RunDirectory | Result,
    profile: LatencyProfile | str | Path | None = None,
    batch_size: int | None = None,
    budget: int = 64,
    tolerance: float | None = None,
    noise: float | None = None,
) -> Comparison:
    """Say whether a plan is still right for other traffic; of one run which groups would gain by a plan of their own.

    Of two measurements without a plan, counters or settings that were run: whether what is served got slower.

    >>> found = compare("vicuna-7b-medusa1", "vicuna-7b-medusa1", budget=8)
    >>> found.keep, round(found.losses[0].served.tokens_per_step, 2)
    (True, 2.04)

    first, others : run directories, results, files of them, or shipped names; the last may be what an engine counted, in
                    several files. Run directories of several drafters are compared by what their plans reach
    profile       : a profile, or the name of a shipped one; by default the first source's, or the second's
    batch_size    : only of this batch size; by default all of the plan's
    budget        : most rows, where the first source has no plan and one is made
    tolerance     : per cent that may be lost; by default 0.5 by a plan or a group, 5 between two measurements
    noise         : how far two launches of one setting differ, as a standard deviation in per cent; by default what repeats say, else 2.5 %
    """
    from treeopt.pipeline.compare import compare

    options = CompareOptions(batch_size=batch_size, budget=budget, tolerance=tolerance, noise=noise)
    return compare(first, *others, profile=profile, options=options)


def score(
    tree: Tree | str | Path,
    calibration: RankTrace | Calibration | str | Path | None = None,
    *,
    run: str | Path | RunDirectory = RUN,
    batch_size: int | None = None,
) -> Score:
    """Say what a tree reaches, and how far it is from the best tree of its size.

    >>> round(score("mc_sim_7b_63", "vicuna-7b-medusa1").given.tokens_per_step, 2)
    2.34

    tree        : a tree, a file in any format that treeopt reads, or the name of a published one
    calibration : a trace, a calibration, or the name of a shipped one (treeopt list); by default the run's
    batch_size  : which of a plan's trees, where ``tree`` is a file with a plan
    """
    from treeopt.pipeline.trees import score

    return score(_opened(run), tree, calibration=calibration, batch_size=batch_size)


def train(
    output: str | Path,
    model: str | Path | Model | None = None,
    *,
    prompts: str | Path | Prompts | None = None,
    rule: str | Rule | None = None,
    recipe: Recipe | None = None,
    texts: TrainOptions | None = None,
    workers: Workers | None = None,
) -> Training:
    """Train heads for a model that has none, on its own answers to prompts; the same call continues a run that was stopped.

    output  : folder for the heads
    rule    : greedy, or how the model samples the answers: "sample:temperature=0.7"
    recipe  : what is trained and how; by default four Medusa-1 heads, one pass over the texts
    texts   : the texts to learn from
    workers : have workers of a Ray cluster write the answers
    """
    from pathlib import Path

    from treeopt.pipeline.session import source_of
    from treeopt.pipeline.train import train
    from treeopt.runtime.training.recipe import Recipe

    source = source_of(model, None, prompts, rule)
    return train(Path(output), source, recipe or Recipe(), texts or TrainOptions(), workers or Workers())


def export(plan: Plan, engine: str, folder: str | Path, *, options: ExportOptions | None = None) -> Exported:
    """Write a plan as an engine's own files (treeopt list engines) into a folder."""
    return plan.export(engine, folder, **(options or ExportOptions()).given)


def load(path: str | Path) -> Result | RunDirectory:
    """Read a file of a run directory, or the shipped file of that name, as the result that it holds; or open a run directory.

    >>> load("vicuna-7b-medusa1").num_heads
    5
    """
    from pathlib import Path

    from treeopt.records.inputs import load_result

    return _opened(path) if Path(path).is_dir() else load_result(path)


def _opened(run: str | Path | RunDirectory) -> RunDirectory:
    from treeopt.records.rundir import RunDirectory

    return RunDirectory.of(run)


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
