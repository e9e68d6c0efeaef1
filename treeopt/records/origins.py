"""What result files share: how they are kept, and what they say of the drafter, the rule and the runtime behind them.

Origins are kept as they were written, with the keys that the measuring session knew; files are checked against these types.
"""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import Self, TypedDict  # pydantic takes none of typing's before Python 3.12

from treeopt.errors import quoted
from treeopt.files import storage
from treeopt.files.fields import NotNegative, Positive, Share
from treeopt.files.provenance import machine, versions
from treeopt.files.shell import command_line
from treeopt.records.display import Drawn

OURS = "treeopt"  # the runtime that decodes here
TIMED = {"model": "of", "dtype": "in", "device": "on", "machine": "on"}  # what latencies depend on


class Kept(Drawn):
    """A dataclass that is a JSON file: its fields are the keys, and `treeopt.files.fields` has their ranges."""

    file_kind: ClassVar[str]

    def document(self) -> dict[str, object]:
        return {"schema": storage.schema(self.file_kind), **storage.document(self)}

    def save(self, path: str | Path) -> None:
        storage.write_json(path, self.file_kind, self.document())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        return storage.typed(cls, storage.read_json(path, cls.file_kind), path)


class DrafterRecord(TypedDict, total=False):
    """A drafter; one without weights of its own has no sha256.

    widest : guesses of its widest block, where every guess depends on how many there are
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
    """The software that decoded: its name, version, and how it was set up.

    launches : whether every round was a launch of the engine, a process of its own
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
    """Where a figure comes from; carried by every file. None stands for unknown.

    threads  : that a processor computes with; None on other devices
    engine   : the runtime that decoded a benchmark, where it is another than treeopt
    imported : files that another tool wrote, and their kind
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
        """The provenance of what this process makes now."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return cls(command=command_line("treeopt", *sys.argv[1:]), time=now, versions=versions(), machine=machine())

    @classmethod
    def of(cls, notes: Mapping[str, Any]) -> Self:
        """The provenance among a file's notes; all of it unknown if they have none."""
        found = notes.get("provenance")
        return found if isinstance(found, cls) else storage.typed(cls, found or {}, "its provenance")

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
    """Whether answers came with the prompts, at which temperature, and whether figures for greedy decoding are estimates."""

    given: bool | None
    temperature: float | None
    is_estimate: bool | None


class Part(TypedDict):
    """A block of a shard: its place among all blocks, and how many sequences it has."""

    key: int
    sequences: Positive


class ShardRecord(TypedDict):
    """What the trace of a shard, or of some shards, says of itself.

    prompts    : digest of all prompts that the calibration asks; block_prompts of them in a block
    num_blocks : of the whole calibration
    blocks     : those that are here, by place
    """

    prompts: str
    block_prompts: Positive
    num_blocks: Positive
    blocks: list[Part]


class Origins(TypedDict, total=False):
    """Keys that records share. ``source`` holds the options of a session, and says of imported accuracies who measured them."""

    drafter: DrafterRecord | None
    acceptance: RuleRecord | None
    answers: Answered | None
    provenance: Provenance | None
    source: str | dict[str, str | bool | int | float | None] | None


def elsewhere(runtime: Runtime, timed: Provenance, here: Provenance) -> str:
    """Where steps were timed, if not where is decoded now: "in vllm", "on cuda:0"; empty where nothing known differs.

    runtime, timed : the runtime and the provenance of the latencies
    here           : the provenance of what is decoded now

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
    """What two records say differently, key by key with both values; versions of packages may differ.

    >>> differing({"threads": 1, "versions": {"torch": "2.7"}}, {"threads": 2, "dtype": None})
    ['threads (1 there, 2 here)']
    """
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        keys = [key for key in dict.fromkeys((*there, *here)) if key not in ("version", "versions")]
        return [said for key in keys for said in differing(there.get(key), here.get(key), f"{name} {key}".strip())]
    return [] if there == here else [f"{name.replace('_', ' ')} ({quoted(there)} there, {quoted(here)} here)"]
