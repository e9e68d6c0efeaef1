"""The options of treeopt, by what they are about: fields of dataclasses, from which commands and records are made.

A function of `treeopt` takes what most people pass as parameters of its own, and the rest as one of these.
`treeopt.records.exchange` has those of servers and other tools' files, `treeopt.runtime.training.recipe.Recipe` those of training.
Importing this is light.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from treeopt.files.options import Options, option
from treeopt.records.rules import Rule

BATCH_SIZES = "sequences decoded at once: 1,4,8"
BUDGET = "most rows verified per sequence and step, root included"
NOISE = "how far two launches of one setting differ, as a standard deviation in per cent; by default what repeats say, else 2.5 %"
ENGINES_THAT_RUN = "vllm, openvino, openvino-int8, the latter two also with -default"


@dataclass(frozen=True)
class Model(Options):
    """A model and its drafter, and how they are loaded."""

    heading: ClassVar[str] = "Model and drafter"
    model: str | None = option(
        "folder, GGUF file or hub id of the target, or smollm2; by default the run's, or the demo", common=True
    )
    drafter: str | None = option(
        "folder, file or hub id of heads or of a draft model, or a name (treeopt list drafters); by default the model's own "
        "heads, or the first shipped",
        common=True,
    )
    draft_depth: int | None = option(
        "how many tokens a draft model, EAGLE, MTP or ngram guesses ahead; by default 5. Of DFlash it is the width of the block "
        "too; by default as wide as it was trained",
        least=1,
    )
    dtype: str | None = option("number format: float64, float32, bfloat16 or float16; by default float32 on CPU")
    device: str | None = option("where the model is: cpu, cuda, cuda:1 and so on; by default cuda where there is one")
    device_map: str | None = option("spread the model over devices: auto, balanced ... (needs accelerate)")
    revision: str | None = option("revision of a hub model")
    trust_remote_code: bool = option("run a hub model's own code", False)
    engine_python: str | None = option(
        "Python of the environment that has vllm, for ``engine`` vllm; by default this one"
    )


@dataclass(frozen=True)
class Prompts(Options):
    """Where prompts come from, and how they are read."""

    heading: ClassVar[str] = "Prompts"
    prompts: str | None = option(
        "a .jsonl, .json, .csv, .parquet or .txt file, a folder, a datasets id, or demo", common=True
    )
    column: str | None = option("column that holds the prompt or conversation; by default the first known name")
    group_by: str | None = option("column to report groups by, for example category")
    responses: str | None = option("column of given answers; they are read in one pass, and nothing is generated")
    split: str | None = option("split of a datasets id")
    chat_template: bool = option(
        "put the tokenizer's chat template around prompts, where it has one", True, flag="--no-chat-template"
    )
    in_order: bool = option("take prompts as they stand in the file, not shuffled", False)
    seed: int | None = option("seed of the prompts' order, of sampling and of training; by default 0")


@dataclass(frozen=True)
class RuleOption(Options):
    """The rule by which guesses are accepted."""

    rule: str | None = option(
        "how guesses are accepted: greedy, sample:temperature=0.7 (lossless), typical ... (treeopt list acceptance). Parameters: "
        "temperature, top_p, top_k; of typical epsilon, delta. With ``responses`` it is the rule that wrote them; by default greedy",
        common=True,
    )

    @property
    def acceptance(self) -> Rule:
        """The rule that is named, or greedy."""
        return Rule.parse(self.rule or "greedy")


@dataclass(frozen=True)
class Source(RuleOption, Prompts, Model):
    """All that a session is opened with; a trace keeps what is `given`."""


@dataclass(frozen=True)
class Workers(Options):
    """Workers of a Ray cluster, each with the model."""

    heading: ClassVar[str] = "Several machines"
    workers: int | None = option("have so many workers of a Ray cluster answer; by default this process does", least=1)
    gpus_per_worker: float | None = option("GPUs of each worker; by default 0", least=0)
    address: str | None = option("HOST:PORT of a running cluster, or auto; by default one on this machine")


@dataclass(frozen=True)
class CalibrateOptions(Options):
    """How accuracies are measured."""

    num_prompts: int = option(
        "prompts to answer; a quarter of them all is held out for bench at least", 128, least=1, common=True
    )
    max_new_tokens: int = option("longest answer", 128, least=1, common=True)
    batch_size: int = option("sequences decoded at once", 16, least=1, common=True)
    ranks: int = option("ranks to tell apart", 32, least=1, most=10_000)
    topks: Sequence[int] = option(
        "nodes that dynamic trees expand on each level, to be recorded: numbers from 1 to 10",
        (2, 4, 8),
        least=1,
        most=10,
        flag="--topk",
    )
    shard: str | None = option(
        "measure every 8th block of prompts only, from the 2nd on: 2/8; treeopt import joins the shards", metavar="I/N"
    )
    overwrite: bool = option("replace another measurement of the run, which is kept otherwise", False, common=True)
    workers: Workers = Workers()


@dataclass(frozen=True)
class ProfileOptions(Options):
    """Which decoding steps are timed, and how well."""

    batch_sizes: Sequence[int] = option(BATCH_SIZES, (1,), least=1, flag="--batch-size", common=True)
    contexts: Sequence[int] = option(
        "hold rows at these lengths [tokens]: 512,4096; by default the prompts'",
        (),
        least=1,
        flag="--context",
        common=True,
    )
    budget: int = option("largest tree size to time, root included", 64, least=1, common=True)
    sizes: Sequence[int] | None = option(
        "time exactly these tree sizes, root included; by default sizes at the edges of tiles", least=1
    )
    precision: float = option(
        "wanted margin of error of every latency: half of its 95 % interval", 0.02, above=0, percent=True
    )
    time_limit_s: float = option(
        "seconds in all, for all batch sizes and contexts", 60.0, above=0, flag="--time-limit", common=True
    )
    calibration: str | None = option(
        "calibration that timed trees are grown on: a file or a name; by default the run's", metavar="FILE"
    )
    engine: str | None = option(
        f"time another runtime's own steps, with chains and dynamic trees: {ENGINES_THAT_RUN}", common=True
    )
    overwrite: bool = option("replace a profile of another model, machine or runtime, which is kept otherwise", False)

    @property
    def largest(self) -> int:
        """The rows of the largest tree."""
        return max(self.sizes or [self.budget])

    @property
    def settings(self) -> list[tuple[int, int | None]]:
        """The batch sizes with each context; None where there is none."""
        contexts: list[int | None] = [*sorted(set(self.contexts))] or [None]
        return [(batch_size, context) for batch_size in sorted(set(self.batch_sizes)) for context in contexts]


@dataclass(frozen=True)
class Latencies(Options):
    """Latencies that are not timed here."""

    heading: ClassVar[str] = "Latencies from elsewhere"
    from_csv: Path | None = option(
        "read latencies of your own engine from a table instead of timing", metavar="FILE", common=True
    )
    runtime: str | None = option("name of the engine of ``from_csv``", metavar="NAME")
    analytical: str | None = option(
        "compute latencies from a device's roofline and the config.json of ``model`` instead of timing",
        metavar="DEVICE",
        common=True,
    )
    random_weights: str | None = option("time a model of this config.json's shape, of random weights", metavar="CONFIG")
    num_heads: int | None = option(
        "number of heads, if no drafter says it; by default as calibrated, or 4", least=1, flag="--heads"
    )


@dataclass(frozen=True)
class SearchOptions(Options):
    """What is planned for."""

    budget: int = option(BUDGET, 64, least=1, common=True)
    batch_sizes: Sequence[int] | Mapping[int, float] | None = option(
        f"{BATCH_SIZES}. With shares, 1:0.5,4:0.3,8:0.2, one tree for all: a share is of the time that the server decodes so many "
        "at once; by default the profile's",
        least=1,
        flag="--batch-size",
        common=True,
    )
    context: int | None = option("tokens that a sequence has; by default as in the trace", least=1, common=True)
    engine: str | None = option("plan what this engine can take (treeopt list engines)", flag="--for", common=True)
    calibration: str | None = option(
        "a calibration or trace: a file, or the name of a shipped one (treeopt list); by default the run's", common=True
    )
    profile: str | None = option("a profile: a file, or the name of a shipped one; by default the run's", common=True)


@dataclass(frozen=True)
class TreeLimits(Options):
    """What trees may be chosen among."""

    heading: ClassVar[str] = "Trees"
    method: str | None = option("one of the engine's ways to speculate; by default the drafter's", common=True)
    shape: str | None = option("shape of trees: sibling-closed or chain; by default what the engine takes")
    max_rank: int | None = option("largest rank of a node; by default 9, or the engine's", least=0)
    max_depth: int | None = option("deepest node; by default the number of heads", least=1, common=True)
    measured_only: bool = option("choose among sizes that were timed, without estimates between", False)


@dataclass(frozen=True)
class BenchOptions(Options):
    """What is decoded, by what."""

    batch_size: int | None = option("which of the plan's; by default its first", least=1, common=True)
    num_prompts: int | None = option("held-out prompts at most; by default 64, or 20 a row", least=1, common=True)
    max_new_tokens: int | None = option("longest answer; by default as calibrated", least=1)
    rounds: int | None = option(
        "times that every contender decodes every prompt at most; by default 1, or 3 launches", least=1
    )
    time_limit_s: float | None = option(
        "seconds of decoding at most, if the verdict is not settled before; with ``lengths`` of all launches together. The launches "
        "of vllm are all made",
        above=0,
        flag="--time-limit",
        common=True,
    )
    engine: str | None = option(
        f"have another runtime decode: transformers, {ENGINES_THAT_RUN}. With ``launch`` whose server it is: vllm, llama-cpp, with "
        "``lengths`` also sglang; by default the command says it",
        common=True,
    )
    trees: Sequence[str | Path] = option(
        "add a tree: a file, or the name of a published one", (), flag="--tree", common=True
    )


@dataclass(frozen=True)
class Server(Options):
    """A server that a command starts, as often as is needed."""

    heading: ClassVar[str] = "A server that is launched"
    launch: str | None = option(
        "have servers answer that this command starts, with {options} and {port} filled in; at all of the plan's batch sizes. With "
        "``lengths`` it is your own command with {port}",
        metavar="COMMAND",
        common=True,
    )
    lengths: Sequence[int] = option(
        "launch each number of guesses per step, 0 for none, and repeat the launches that are worth it: 0,2,4,8",
        (),
        least=0,
        common=True,
    )
    clients: Sequence[int] = option("with ``lengths``, how many prompts are answered at once: 1,4,16", (1,), least=1)
    present: str | None = option(
        "the options of speculation that you serve with now, in place of {options}", metavar="OPTIONS"
    )
    within_s: float = option("seconds that a server may take to be healthy", 900.0, above=0, flag="--healthy-within")


@dataclass(frozen=True)
class CompareOptions(Options):
    """How two measurements are compared."""

    profile: str | None = option(
        "a profile, or the name of a shipped one; by default the first source's, or the second's", common=True
    )
    batch_size: int | None = option("only of this batch size; by default all of the plan's", least=1, common=True)
    budget: int = option("most rows, where the first source has no plan and one is made", 64, least=1, common=True)
    tolerance: float | None = option(
        "per cent that may be lost; by default 0.5 by a plan or a group, 5 between two measurements",
        least=0,
        most=99.9,
        common=True,
    )
    noise: float | None = option(NOISE, above=0, most=1000, common=True)


@dataclass(frozen=True)
class LineOptions(Options):
    """Options of the whole line; with an engine that one is timed and decodes, and the plan is for it alone."""

    batch_sizes: Sequence[int] = option(BATCH_SIZES, (1,), least=1, flag="--batch-size", common=True)
    budget: int = option(BUDGET, 64, least=1, common=True)
    engine: str | None = option(f"time, plan for and decode in this runtime: {ENGINES_THAT_RUN}", common=True)
    num_prompts: int = option("prompts to calibrate on", 64, least=1, common=True)
    max_new_tokens: int = option("longest answer", 128, least=1, common=True)
    bench_prompts: int | None = option("held-out prompts at most; by default 64, or 20 a row", least=1)
    bench_limit_s: float = option("seconds of decoding them at most", 60.0, above=0, flag="--bench-limit")
    time_limit_s: float = option("seconds for timing steps", 20.0, above=0, flag="--time-limit", common=True)
    overwrite: bool = option("replace other measurements of the run", False, common=True)


@dataclass(frozen=True)
class TrainOptions(Options):
    """The texts to learn from, and how it is computed."""

    heading: ClassVar[str] = "Texts to learn from"
    num_prompts: int = option("prompts to answer", 1024, least=1, common=True)
    max_new_tokens: int = option("longest answer", 128, least=1, common=True)
    tokens: int | None = option("longest text, prompt included; by default the model's context", least=1)
    answers: Path | None = option(
        "folder for the model's answers, which several runs may share; by default beside the heads"
    )
    mixed_precision: str | None = option(
        "number format of matrix products; by default bf16 for a model in half precision on CUDA",
        choices=("no", "bf16"),
    )
