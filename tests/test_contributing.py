"""CONTRIBUTING.md is true: its drawing of the rooms, its paths, and its lists of the files to touch."""

import re
from pathlib import Path

import pytest

from .test_house import arrows, room_of

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"^## Add an? (\w+)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))


def drawn() -> dict[str, int]:
    """The rooms of the first drawing, each with its line."""
    drawing = TEXT.partition("## Where things are")[2].split("```")[1].strip("\n")
    return {room: n for n, line in enumerate(drawing.split("\n")) for room in re.findall(r"(?:^|  )(\w+)/? ", line)}


def test_the_drawing_has_every_room_and_no_arrow_goes_up():
    floor = drawn()
    found = {tuple(map(room_of, edge)) for edge in arrows().edges}
    rooms = {room for edge in found for room in edge} - {"treeopt", "__main__"}
    assert rooms <= floor.keys()
    assert not {
        (one, other) for one, other in found if not {"treeopt", "__main__"} & {one, other} and floor[one] > floor[other]
    }


def test_every_path_exists():
    for path in re.findall(r"`([\w./]+/[\w.]*)`", TEXT):
        assert "NAME" in path or (ROOT / path).exists(), path


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("thing", ["engine", "drafter", "figure"])
def test_the_list_of_files_to_touch_is_that_of_the_example(thing):
    """All files of the package that name the example's code, and no other; the tests and pages of the list name it, too."""
    name, code = re.search(r"^Example: `([\w-]+)`, whose code is `([\w.]+)`", RECIPES[thing], re.MULTILINE).groups()
    listed = re.findall(r"^- `(\S+)`", RECIPES[thing], re.MULTILINE)
    paths = {path.replace("NAME", name.replace("-", "_")) for path in listed}
    naming = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "treeopt").rglob("*.py")
        if re.search(rf"\b{re.escape(code)}\b", f"{dotted(path)} {path.read_text(encoding='utf-8')}")
    }
    assert naming == {path for path in paths if path.startswith("treeopt/")}
    for path in paths - naming:
        assert re.search(rf"\b({name}|{re.escape(code)})\b", (ROOT / path).read_text(encoding="utf-8")), path
