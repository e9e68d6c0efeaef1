"""The machine, and the versions of packages that can change a figure."""

import platform
import re
from importlib import metadata
from pathlib import Path

PACKAGES = ("treeopt", "torch", "transformers", "numpy")


def versions() -> dict[str, str | None]:
    """Versions of Python and of `PACKAGES`; None for a package that is not installed."""
    installed: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = None
    return installed


def machine() -> str:
    """The system and the name of its processor."""
    try:
        named = re.search(r"^model name\s*: *(.+)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
    except OSError:
        named = None
    cpu = named[1].strip() if named else platform.processor() or "unknown processor"
    return f"{platform.system()} {platform.machine()}, {cpu}"
