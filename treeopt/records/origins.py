"""What result files share: how they are saved, and the drafter, the rule, the runtime and the machine behind them."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import Self, TypedDict  # pydantic takes none of typing's before Python 3.12

from treeopt.errors import InvalidInput, quoted
from treeopt.files import storage
from treeopt.files.fields import NotNegative, Positive, Share
from treeopt.files.provenance import machine, versions
from treeopt.files.shell import command_line
from treeopt.records.display import Drawn

OURS = "treeopt"  # the name of treeopt's own runtime


class JsonRecord(Drawn):
    """A dataclass that is saved as a JSON file. Its fields are the keys; `treeopt.files.fields` has types with ranges."""

    file_kind: ClassVar[str]

    def document(self) -> dict[str, object]:
        return {"schema": storage.schema(self.file_kind), **storage.document(self)}

    def save(self, path: str | Path) -> None:
        storage.write_json(path, self.file_kind, self.document())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        return storage.typed(cls, storage.read_json(path, cls.file_kind), path)


class DrafterRecord(TypedDict, total=False):
    """A drafter.

    sha256 : of its weights; None where it has none of its own
    widest : guesses of its widest block, for a drafter whose guesses depend on the width of the block
    """

    kind: str | None
    id: str | None
    layout: str | None
    sha256: str | None
    num_heads: int | None
    num_layers: int | None
    widest: Positive | None


class RuleRecord(TypedDict, total=False):
    """An acceptance rule and its parameters; `treeopt.records.rules` says what they mean."""

    rule: Literal["greedy", "sample-then-match", "rejection", "typical"] | None
    temperature: NotNegative | None
    top_p: Annotated[float, Field(gt=0, le=1)] | None
    top_k: Annotated[int, Field(ge=1)] | None
    seed: int | None
    epsilon: Share | None
    delta: NotNegative | None


class Runtime(TypedDict, total=False):
    """The software that decoded: its name, version and settings.

    launches : whether the engine was started anew for every round
    """

    name: str | None
    version: str | None
    attention: str | None
    weights: str | None
    command: str | None
    about: str | None
    launches: bool | None


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a figure comes from: every file carries it. None stands for unknown.

    threads  : number of threads on a CPU; None on other devices
    engine   : the runtime that decoded a benchmark, unless it is treeopt
    imported : the files of another tool, and their kind
    """

    model: str | None = None
    revision: str | None = None
    drafter: DrafterRecord | None = None
    dataset: str | None = None
    dataset_fingerprint: str | None = None
    acceptance: RuleRecord | None = None
    device: str | None = None
    dtype: str | None = None
    seed: int | None = None
    threads: int | None = None
    command: str | None = None
    time: str | None = None
    versions: dict[str, str | None] | None = None
    machine: str | None = None
    engine: Runtime | None = None
    imported: dict[str, Any] | None = None

    @classmethod
    def here(cls) -> Self:
        """The provenance of a result that this process makes now."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return cls(command=command_line("treeopt", *sys.argv[1:]), time=now, versions=versions(), machine=machine())

    @classmethod
    def of(cls, notes: Mapping[str, Any]) -> Self:
        """The provenance under the key of that name; all of it unknown if there is none."""
        provenance = notes.get("provenance")
        return provenance if isinstance(provenance, cls) else storage.typed(cls, provenance or {}, "its provenance")

    @property
    def record(self) -> dict[str, object]:
        """The JSON object of files, with null for unknown values."""
        return {
            key: value for key, value in vars(self).items() if value is not None or key not in ("engine", "imported")
        }


class SkippedRow(TypedDict, total=False):
    row: int | None
    turn: int | None
    reason: str


class Answered(TypedDict, total=False):
    """How a trace has its answers.

    given       : whether they came with the prompts
    temperature : at which they were sampled
    is_estimate : whether figures for greedy decoding are estimates
    """

    given: bool | None
    temperature: float | None
    is_estimate: bool | None


class ShardRecord(TypedDict):
    """What the trace of a shard says of itself.

    prompts       : digest of all prompts of the calibration
    block_prompts : prompts of a block
    index, count  : which shard it is, from 1, and how many there are
    sequences     : of each of its blocks
    """

    prompts: str
    block_prompts: Positive
    index: Positive
    count: Positive
    sequences: list[Positive]


class Origins(TypedDict, total=False):
    """Keys that records share.

    drafter, acceptance : as in the trace
    answers             : whether they came with the prompts, and what that makes of the figures
    provenance          : whose measurement it is
    source              : the options of the session; else who measured: `measured`, `published`, `imported`, `engine log`
    """

    drafter: DrafterRecord | None
    acceptance: RuleRecord | None
    answers: Answered | None
    provenance: Provenance | None
    source: str | dict[str, str | bool | int | float | None] | None


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Whatever two measurements must have in common to belong together. None, or a missing key, stands for unknown.

    drafter  : its kind, heads and layers; of accuracies also its weights, or its name where it has none
    machine, threads, runtime, weights : of latencies alone
    settings : other values by name, which two measurements of one kind must have alike, None included
    """

    model: str | None = None
    served_model: str | None = None
    revision: str | None = None
    dtype: str | None = None
    device: str | None = None
    drafter: Mapping[str, Any] = field(default_factory=dict)
    acceptance: Mapping[str, Any] = field(default_factory=dict)
    machine: str | None = None
    threads: int | None = None
    runtime: str | None = None
    weights: str | None = None
    settings: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, notes: Mapping[str, Any]) -> Self:
        """The origin of accuracies, by what their file notes beside them. A seed does not tell two rules apart."""
        provenance = Provenance.of(notes)
        drafter: Mapping[str, Any] = notes.get("drafter") or provenance.drafter or {}
        rule: Mapping[str, Any] = notes.get("acceptance") or provenance.acceptance or {}
        keys = ("kind", "num_heads", "num_layers", "id" if drafter.get("sha256") is None else "sha256")
        return cls(
            model=provenance.model,
            served_model=notes.get("served_model"),
            revision=provenance.revision,
            dtype=provenance.dtype,
            device=provenance.device,
            drafter={key: drafter[key] for key in keys if drafter.get(key) is not None},
            acceptance={
                key: rule[key] for key in rule if key == "rule" or (key != "seed" and rule.get("rule") != "greedy")
            },
        )

    @classmethod
    def of_latencies(cls, notes: Mapping[str, Any], runtime: Mapping[str, Any]) -> Self:
        """The origin of latencies, by what their file notes beside them. Drafters of other weights take as long."""
        origin, provenance = cls.of(notes), Provenance.of(notes)
        return replace(
            origin,
            drafter={key: value for key, value in origin.drafter.items() if key != "sha256"},
            machine=provenance.machine,
            threads=provenance.threads,
            runtime=runtime.get("name"),
            weights=runtime.get("weights") or "checkpoint",
        )

    @property
    def anywhere(self) -> Self:
        """The origin without number format and device, on which accuracies hardly depend."""
        return replace(self, dtype=None, device=None)


def same_origin(there: Origin, here: Origin) -> list[str]:
    """Why two measurements do not belong together: each difference with both values; empty where they do.

    >>> same_origin(Origin(dtype="float16", threads=1), Origin(dtype="float32"))
    ["dtype ('float16' there, 'float32' here)"]
    """
    differences = []
    for part in fields(Origin):
        first, other = getattr(there, part.name), getattr(here, part.name)
        if first is None or other is None:
            continue
        if part.name == "settings":
            differences += _differing(first, other)
        elif isinstance(first, Mapping):
            for key in [key for key in first if key in other]:
                differences += _differing(first[key], other[key], f"{part.name} {key}")
        else:
            differences += _differing(first, other, part.name)
    return differences


def check_same_origin(
    there: Origin, here: Origin, what: str, remedy: str = "treeopt status says what a run holds."
) -> None:
    """Raise InvalidInput where two measurements do not belong together.

    what   : both, at the beginning of the message
    remedy : its last sentence, which names a command
    """
    if differences := same_origin(there, here):
        raise InvalidInput(f"{what} do not belong together: they differ in {', '.join(differences)}. {remedy}")


def _differing(there: Any, here: Any, name: str = "") -> list[str]:
    """The differences of two values, each by its name; those of mappings by their keys. Versions of packages may differ."""
    if not (isinstance(there, Mapping) and isinstance(here, Mapping)):
        return [] if there == here else [f"{name.replace('_', ' ')} ({quoted(there)} there, {quoted(here)} here)"]
    differences = []
    for key in dict.fromkeys((*there, *here)):
        if key != "version":
            differences += _differing(there.get(key), here.get(key), f"{name} {key}".strip())
    return differences
