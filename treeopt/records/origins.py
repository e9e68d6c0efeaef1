"""What records say of the drafter, the acceptance rule and the runtime that they were measured with.

They are kept as they were written, with the keys that the measuring session knew. `check_origins` checks their types.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict  # pydantic takes none of typing's before Python 3.12

from treeopt.files import storage


class Drafter(TypedDict, total=False):
    """A drafter; one without weights of its own has no sha256."""

    kind: str | None
    id: str | None
    layout: str | None
    sha256: str | None
    num_heads: int | None
    num_layers: int | None


class Acceptance(TypedDict, total=False):
    """An acceptance rule and its parameters; `treeopt.records.rules` says what they mean."""

    rule: str | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    epsilon: float | None
    delta: float | None


class Runtime(TypedDict, total=False):
    """What decoded: its name, version, and how it was set up."""

    name: str | None
    version: str | None
    attention: str | None
    compiled: bool | None
    cuda_graphs: bool | None
    weights: str | None
    command: str | None


class Provenance(TypedDict, total=False):
    """What `treeopt.files.provenance` writes."""

    model: str | None
    revision: str | None
    drafter: Drafter | None
    dataset: str | None
    dataset_fingerprint: str | None
    acceptance: Acceptance | None
    device: str | None
    dtype: str | None
    seed: int | None
    threads: int | None
    command: str | None
    time: str | None
    versions: dict[str, str | None] | None
    machine: str | None


class Origins(TypedDict, total=False):
    """Keys that records share. ``source`` holds the options of a trace, and says of a calibration who measured it."""

    drafter: Drafter | None
    acceptance: Acceptance | None
    provenance: Provenance | None
    source: str | dict[str, str | bool | int | float | None] | None


def check_origins(record: Mapping[str, Any], file: str | Path) -> None:
    """Raise InvalidInput, naming the place, unless what a record from ``file`` says of its origins is of these types."""
    storage.typed(Origins, {key: record[key] for key in Origins.__annotations__ if key in record}, file)
