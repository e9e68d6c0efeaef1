"""Where a figure comes from: model, drafter, data, rule, machine, versions, command and time."""

from __future__ import annotations

import platform
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from treeopt.files.shell import command_line

PACKAGES = ("treeopt", "torch", "transformers", "numpy")


@dataclass(frozen=True)
class Provenance:
    """Carried by every file; None where something is unknown."""

    model: str | None = None
    revision: str | None = None
    drafter: dict[str, Any] | None = None  # kind, id, sha256
    dataset: str | None = None
    dataset_fingerprint: str | None = None
    acceptance: dict[str, Any] | None = None  # rule and its parameters
    device: str | None = None
    dtype: str | None = None
    seed: int | None = None
    threads: int | None = None  # that a processor computes with; None on other devices
    command: str = field(default_factory=lambda: command_line("treeopt", *sys.argv[1:]))
    time: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    versions: dict[str, str | None] = field(default_factory=lambda: versions())
    machine: str = field(default_factory=lambda: machine())

    def record(self) -> dict[str, Any]:
        return asdict(self)


def versions() -> dict[str, str | None]:
    """Installed versions of the packages that can change a figure, and of Python."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def machine() -> str:
    """The system and the processor, by the name that the system tells."""
    try:
        named = re.search(r"^model name\s*: *(.+)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
    except OSError:
        named = None
    cpu = named[1].strip() if named else platform.processor() or "unknown processor"
    return f"{platform.system()} {platform.machine()}, {cpu}"
