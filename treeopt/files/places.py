"""Names of models, drafters, prompts and shipped files: paths of this machine, and ids of a hub.

A hub is never asked for a path: a name that begins with . ~ or /, or a name OWNER/NAME whose OWNER is a folder here.
"""

import os
import re
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path

from treeopt.errors import InvalidInput, meant

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(:[\w.-]+)?", re.ASCII)  # OWNER/NAME:CONFIGURATION


def find_local(name: str, must: str) -> Path | None:
    """The file or folder of that name; None for a name that may be a hub's.

    must : beginning of the message of InvalidInput for any other name: "--model must be a folder or a hub id"
    """
    path = os.path.expanduser(name)
    if os.path.exists(path):
        return Path(path)
    if HUB_ID.fullmatch(name) and not ("/" in name and os.path.exists(name.partition("/")[0])):
        return None
    raise InvalidInput(f"{must}, but {os.path.abspath(path) if name else name} does not exist.")


def located(name: str) -> str:
    """The absolute path of a file or folder of that name; the name itself where there is none.

    >>> located("no-such-owner/no-such-model")
    'no-such-owner/no-such-model'
    """
    path = os.path.expanduser(name)
    return os.path.abspath(path) if os.path.exists(path) else name


def user_cache() -> Path:
    """The folder of files that can be made again, by XDG_CACHE_HOME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treeopt"


def folder_name(name: str) -> str:
    """A name for a folder, made of any name of a drafter or a group.

    >>> folder_name("mtp:own"), folder_name("/models/my heads/"), folder_name("$(x)"), folder_name("..")
    ('mtp-own', 'my-heads', 'x', 'unnamed')
    """
    last = name.rstrip("/").rsplit("/", 1)[-1]
    return re.sub(r"[^A-Za-z0-9._]+", "-", last).strip("-.")[:64] or "unnamed"


def distinct(names: Sequence[str]) -> list[str]:
    """The names, with a number behind each that is there already.

    >>> distinct(["medusa", "hydra", "medusa", "medusa-2"])
    ['medusa', 'hydra', 'medusa-2', 'medusa-2-2']
    """
    taken: list[str] = []
    for name in names:
        numbered = (f"{name}-{n}" for n in count(2))
        taken.append(next(other for other in chain([name], numbered) if other not in taken))
    return taken


def shipped(kind: str) -> dict[str, Path]:
    """Name to file of the shipped files of a kind ("calibration", "profiles"), in the wheel or in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "shipped" / kind
    folder = installed if installed.is_dir() else package.parent / kind
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def find_shipped(kind: str, path_or_name: str) -> Path:
    """A file by its path, or a shipped file by its name. Raises InvalidInput where there is neither."""
    path = Path(path_or_name)
    if path.exists():
        return path
    files = shipped(kind)
    if path_or_name not in files:
        names = ", ".join(files) or "none"
        raise InvalidInput(
            f"There is no file {path_or_name}, nor a shipped one of that name ({names}).{meant(path_or_name, files)}"
        )
    return files[path_or_name]
