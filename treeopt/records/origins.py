"""What result files share: how they are saved, and the drafter, the rule, the runtime and the machine behind them."""

import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
TIMED = {"model": "of", "dtype": "in", "device": "on", "machine": "on"}  # origins that latencies depend on


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
    compiled: bool | None
    cuda_graphs: bool | None
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

    source : the options of the session; of imported accuracies the name of what measured them
    """

    drafter: DrafterRecord | None
    acceptance: RuleRecord | None
    answers: Answered | None
    provenance: Provenance | None
    source: str | dict[str, str | bool | int | float | None] | None


def elsewhere(runtime: Runtime, timed: Provenance, here: Provenance) -> str:
    """Where steps were timed, for example "in vllm" or "on cuda:0"; empty where it is the same place, or unknown.

    runtime, timed : the runtime and the provenance of the latencies
    here           : the provenance of what is decoded

    >>> here = Provenance(dtype="float32")
    >>> elsewhere({"name": "vllm"}, here, here), elsewhere({"name": "treeopt"}, Provenance(dtype="float16"), here)
    ('in vllm', 'in float16')
    """
    if runtime.get("name") not in (None, (here.engine or {}).get("name", OURS)):
        return f"in {runtime['name']}"
    if runtime.get("weights"):
        return f"with {runtime['weights']}"
    for key, word in TIMED.items():
        there, now = getattr(timed, key), getattr(here, key)
        if there != now and None not in (there, now):
            return f"{word} {there}"
    return ""


def differing(there: Any, here: Any, name: str = "") -> list[str]:
    """The differences of two records, each by its key and both values. Versions of packages may differ.

    >>> differing({"threads": 1, "versions": {"torch": "2.7"}}, {"threads": 2, "dtype": None})
    ['threads (1 there, 2 here)']
    """
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        differences = []
        for key in dict.fromkeys((*there, *here)):
            if key not in ("version", "versions"):
                differences += differing(there.get(key), here.get(key), f"{name} {key}".strip())
        return differences
    return [] if there == here else [f"{name.replace('_', ' ')} ({quoted(there)} there, {quoted(here)} here)"]


def keep_other(file: Path, differs: Iterable[str], remedy: str = "") -> None:
    """Raise InvalidInput for a file that would be replaced by another measurement, whose differences are given."""
    if found := ", ".join(dict.fromkeys(differs)):
        raise InvalidInput(
            f"{file} is another measurement and is not replaced unasked; they differ in {found}. Pass another `run`, or "
            f"`overwrite`{remedy}."
        )
