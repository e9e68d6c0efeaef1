"""The house: arrows between rooms only go down, and no file, function or list of parameters grows without bound.

A room is a folder of treeopt/. Its imports count wherever they stand: lazy ones in functions and those for types too.
"""

import ast
import re
from functools import cache
from pathlib import Path

import networkx
import pytest

import treeopt

ROOT = Path(treeopt.__file__).parent
# From the top down. Rooms of one floor may import each other where that makes no circle of rooms.
FLOORS = (
    ("__main__",),  # python -m treeopt
    ("cli",),
    ("treeopt",),  # the public API, which the commands call
    ("pipeline",),
    ("report",),
    ("planning", "runtime", "serving"),
    ("growth", "latency", "engines", "text", "arms"),
    ("records",),
    ("trees", "files", "demo"),
    ("errors",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
LIGHT = {"treeopt.__version__", "treeopt.RUN"}  # what lies in treeopt/__init__.py for everybody
LINES, BODY, PARAMETERS = 400, 60, 8
# Lines of all Python files of a folder. They only fall: who raises one says why in CHANGELOG.md.
SUMS = {"treeopt": 42_162, "tests": 30_901}
SOURCES = {"RankTrace", "Calibration", "Probe"}


@cache
def modules() -> dict[str, ast.Module]:
    """Syntax trees by the module's full name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("treeopt", *path.relative_to(ROOT).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def path_of(module: str) -> Path:
    path = ROOT.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "treeopt"


def imports_of(module: str) -> set[str]:
    """The modules of treeopt that one imports."""
    known, found = modules(), set()
    for node in ast.walk(known[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "treeopt"}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports by a relative name"
            if node.module and node.module.split(".")[0] == "treeopt":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found |= {name if name in known else node.module for name in names if name not in LIGHT}
    return found - {module}


@cache
def arrows() -> networkx.DiGraph:
    return networkx.DiGraph([(module, other) for module in modules() for other in imports_of(module)])


def functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions by their full name, methods and nested ones too."""
    found = []

    def visit(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                if not isinstance(child, ast.ClassDef):
                    found.append((f"{name}.{child.name}", child))
                visit(child, f"{name}.{child.name}")
            else:
                visit(child, name)

    for module, tree in modules().items():
        visit(tree, module)
    return found


def rising_arrows() -> set[str]:
    """A room imports rooms of its floor and below."""
    return {
        f"{module} -> {other}"
        for module, other in arrows().edges
        if room_of(module) != room_of(other) and FLOOR[room_of(other)] < FLOOR[room_of(module)]
    }


def circles(graph: networkx.DiGraph) -> set[str]:
    return {" ".join(sorted(part)) for part in networkx.strongly_connected_components(graph) if len(part) > 1}


def circles_of_modules() -> set[str]:
    """A package and its modules do not count as a circle where only ``__init__`` gathers their names."""
    graph = networkx.DiGraph(
        (a, b) for a, b in arrows().edges if not a.startswith(b + ".") and not b.startswith(a + ".")
    )
    return circles(graph)


def circles_of_rooms() -> set[str]:
    pairs = {(room_of(a), room_of(b)) for a, b in arrows().edges}
    return circles(networkx.DiGraph((a, b) for a, b in pairs if a != b))


def files_too_long() -> set[str]:
    return {module for module in modules() if path_of(module).read_text("utf-8").count("\n") > LINES}


def functions_too_long() -> set[str]:
    return {name for name, node in functions() if node.end_lineno - node.lineno + 1 > BODY}


def functions_of_many_parameters() -> set[str]:
    """Parameters are counted with what ``*`` and ``**`` take: one each."""
    found = set()
    for name, node in functions():
        a = node.args
        parameters = [p for p in (*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg) if p is not None]
        if sum(p.arg not in ("self", "cls") for p in parameters) > PARAMETERS:
            found.add(name)
    return found


def questions_for_a_sources_type() -> set[str]:
    """``isinstance`` on traces, calibrations and probes belongs to records/; growth/source.py is the place that tells
    the kinds apart, by a table."""
    found = set()
    for module, tree in modules().items():
        if room_of(module) == "records":
            continue
        for node in ast.walk(tree):
            asked = (
                node.args[1] if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance" else None
            )
            asked = node.cls if isinstance(node, ast.MatchClass) else asked
            if asked and SOURCES & {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(asked)}:
                found.add(module)
    return found


def formatting_left_to_hands() -> set[str]:
    """``# fmt: skip`` stands at tables of data alone: at assignments on the top level of a module."""
    found = set()
    for module, tree in modules().items():
        tables = [n for n in tree.body if isinstance(n, ast.Assign | ast.AnnAssign)]
        for number, line in enumerate(path_of(module).read_text("utf-8").splitlines(), 1):
            inside = any(node.lineno <= number <= (node.end_lineno or 0) for node in tables)
            if re.search(r"# fmt: (skip|off)", line) and not inside:
                found.add(module)
    return found


RULES = (
    rising_arrows,
    circles_of_modules,
    circles_of_rooms,
    files_too_long,
    functions_too_long,
    functions_of_many_parameters,
    questions_for_a_sources_type,
    formatting_left_to_hands,
)


@pytest.mark.parametrize("folder", SUMS)
def test_the_sum_of_lines(folder):
    """The package and its tests have at most the lines that are due."""
    files = (ROOT.parent / folder).rglob("*.py")
    assert sum(path.read_text("utf-8").count("\n") for path in files) <= SUMS[folder]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_stays_as_it_is_drawn(rule):
    assert rule() == set()


def test_the_top_level_has_the_public_names_and_the_errors_alone():
    assert {path.stem for path in ROOT.glob("*.py")} == {"__init__", "__main__", "errors"}
    assert {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()} | {
        "errors",
        "treeopt",
        "__main__",
    } == FLOOR.keys()
