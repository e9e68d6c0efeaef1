"""The names of all engines, from this folder's files, none of which is imported."""

import re
from pathlib import Path

NAMED = re.compile(r'ServingEngine\(\s*name="([^"]+)"')


def engine_names() -> list[str]:
    """The names in alphabetical order.

    >>> from treeopt.engines.registry import ENGINES
    >>> engine_names() == list(ENGINES)
    True
    """
    files = Path(__file__).parent.glob("*.py")
    return sorted(name for file in files for name in NAMED.findall(file.read_text(encoding="utf-8")))
