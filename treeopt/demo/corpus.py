"""The Python standard library as a text corpus: every user's machine has it.

The demo model learned from its training part; the demo's prompts are cut from the held-out part.
The split is by a hash of the *top-level* package, so no module of a held-out package was trained
on, whichever Python version the user runs. Packages whose files are near-copies of one another,
or tables, or tests, are left out on both sides.
"""

import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

from treeopt.errors import InvalidInput

LEFT_OUT = frozenset({"encodings", "pydoc_data", "test", "tests", "idlelib", "lib2to3", "site-packages", "__phello__"})
HELD_OUT_SHARE = 0.10


class Module(NamedTuple):
    name: str  # path below the library's folder, with '/' on every system
    text: str


def is_held_out(package: str) -> bool:
    """Whether a top-level package (or single-file module) belongs to the held-out part.

    >>> is_held_out("argparse"), is_held_out("asyncio")
    (False, False)
    """
    digest = hashlib.sha256(package.encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def standard_library(*, held_out: bool) -> list[Module]:
    """The training or the held-out modules of this interpreter's standard library, sorted by name.

    Raises InvalidInput where the sources are not installed (some minimal images drop them).
    """
    root, modules = Path(sysconfig.get_paths()["stdlib"]), []
    tops = [top for top in root.iterdir() if top.name not in LEFT_OUT and is_held_out(top.stem) == held_out]
    for path in sorted(path for top in tops for path in (top, *top.rglob("*.py")) if path.suffix == ".py"):
        parts = path.relative_to(root).parts
        if not parts[0].startswith("_sysconfigdata") and "-" not in parts[0] and LEFT_OUT.isdisjoint(parts):
            modules.append(Module("/".join(parts), path.read_text(encoding="utf-8", errors="replace")))
    if not modules:
        raise InvalidInput(
            f"The demo needs the sources of the Python standard library, but {root} has none. "
            "Install them, or bring your own: treeopt run --model M --drafter D --prompts P"
        )
    return modules


def fingerprint(modules: list[Module]) -> str:
    """sha256 over names and texts: which standard library the prompts were cut from.

    >>> fingerprint([Module("a.py", "x = 1")])[:12]
    'db6c345bfe9f'
    """
    digest = hashlib.sha256()
    for module in modules:
        digest.update(f"{module.name}\0{module.text}\0".encode())
    return digest.hexdigest()
