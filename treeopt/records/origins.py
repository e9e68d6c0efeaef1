"""What records say of the drafter, the acceptance rule and the runtime that they were measured with.

They are kept as they were written, with the keys that the measuring session knew.
"""

from __future__ import annotations

from typing_extensions import TypedDict  # pydantic takes none of typing's before Python 3.12


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
