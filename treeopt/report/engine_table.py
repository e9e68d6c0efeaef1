"""The engines in words: all in a short table, one with everything that is known of it, JSON."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from importlib.util import find_spec
from shutil import which

from rich.console import RenderableType

from treeopt.engines.base import Method, ServingEngine
from treeopt.engines.registry import search_for
from treeopt.records.rundir import ENGINES as RUNTIMES
from treeopt.report.table import Table, texts
from treeopt.report.terminal import together

LIMITS = {"max_rank": "rank", "max_depth": "depth", "max_batch_size": "batch"}
NONE = "–"
TAKES = {
    "any": "any tree",
    "sibling-closed": "a tree without gaps",
    "low-rank-expands": "a tree, likelier nodes first",
    "chain": "one chain",
}  # by the shape
LEFT_OUT = ("engine", "name", "write", "refuses", "limits")  # of a method: its functions, and what has another name


def records(engines: Mapping[str, ServingEngine]) -> list[dict[str, object]]:
    """Every method with all that the table knows of it, JSON-ready."""
    return [
        {"engine": engine.name, "title": engine.title, "package": engine.package, "method": method.name}
        | {"runs_here": runs_here(engine)}
        | asdict(method.limits)
        | {f.name: getattr(method, f.name) for f in fields(method) if f.name not in LEFT_OUT}
        for engine in engines.values()
        for method in engine.methods
    ]


def limits(method: Method) -> str:
    """The bounds of a tree or chain beside its shape."""
    bounds = {**vars(method.limits), "max_batch_size": method.max_batch_size}
    return ", ".join(f"{word} ≤ {bounds[name]}" for name, word in LIMITS.items() if bounds[name] is not None) or NONE


def takes(method: Method) -> str:
    """The drafts that the engine takes this way, in a few words.

    >>> from treeopt.engines.registry import ENGINES
    >>> [takes(method) for method in ENGINES["vllm"].methods]
    ['a chain for each batch size', 'one chain', 'one chain', 'copied text']
    """
    if method.by_batch_size:
        return f"{'a dynamic tree' if method.limits.dynamic else 'a chain'} for each batch size"
    if method.limits.copies:
        return "copied text"
    return "one dynamic tree" if method.limits.dynamic else TAKES[method.limits.shape]


def available(method: Method) -> str:
    return method.versions if method.status == "live" else f"{method.versions}; {method.status}"


def checked(method: Method) -> str:
    """The release, month or commit that a method was checked against, or when it was removed, in a few words.

    >>> from treeopt.engines.registry import ENGINES
    >>> [checked(method) for method in ENGINES["tensorrt-llm"].methods][:2]
    ['removed in PR #15918', '0004396']
    """
    if method.status != "live":
        return method.status.replace("upstream ", "")
    return method.checked.split(", ")[0].split(" (")[0].split()[-1]


def runs_here(engine: ServingEngine) -> dict[str, bool]:
    """How profile and bench run the engine itself, and whether what that takes is installed on this machine.

    >>> from treeopt.engines.registry import ENGINES
    >>> list(runs_here(ENGINES["transformers"])), runs_here(ENGINES["hydra"])
    (['--engine transformers', "--launch 'transformers serve ...'"], {})
    """
    package = bool(engine.package and find_spec(engine.package.replace("-", "_")))
    ways = {f"--engine {engine.name}": package} if engine.name in RUNTIMES else {}
    if program := engine.server.partition(" ")[0]:
        ways[f"--launch '{engine.server} ...'"] = package if program == "python" else which(program) is not None
    return ways


FACTS: dict[str, Callable[[ServingEngine, Method], str]] = {
    "takes": lambda e, m: takes(m),
    "limits": lambda e, m: limits(m),
    "drafters": lambda e, m: ", ".join(m.drafters),
    "acceptance": lambda e, m: ", ".join(m.rules),
    "goes to": lambda e, m: m.carrier,
    "by batch size": lambda e, m: "schedule" if m.by_batch_size else NONE,
    "versions": lambda e, m: available(m),
    "checked": lambda e, m: m.checked,
    "runs here": lambda e, m: (
        ", ".join(f"{way}{'' if is_in else ' (not installed)'}" for way, is_in in runs_here(e).items()) or NONE
    ),
    "package": lambda e, m: e.package or "its source is not on the Python package index",
    "n-grams": lambda e, m: m.looks_up or NONE,
    "read in": lambda e, m: m.source,
    "plan with": lambda e, m: search_for(m),
}


def engine_table(engines: Mapping[str, ServingEngine]) -> Table:
    """One row a method, the usual one of each engine first; below them which engines run here, and by which option."""
    rows = [
        (engine.name if i == 0 else "", takes(method), ", ".join(method.drafters), checked(method))
        for engine in engines.values()
        for i, method in enumerate(engine.methods)
    ]
    ways = [f"{one.name} by {way.split()[0]}" for one in engines.values() for way, yes in runs_here(one).items() if yes]
    more = f"Run here: {', '.join(ways) or 'none'}. Limits, files and sources of an engine: treeopt list engines NAME"
    columns = texts("engine", "takes", "drafters", "checked", names=4)
    return Table("Engines that --for and --to take", columns, rows, caption=more)


def method_table(engine: ServingEngine) -> RenderableType:
    tables = []
    for i, method in enumerate(engine.methods):
        usual = ", the usual one" if i == 0 < len(engine.methods) - 1 else ""
        rows = [(word, tell(engine, method)) for word, tell in FACTS.items()]
        tables.append(Table(f"{engine.title}: {method.name}{usual}", texts("", "", names=2), rows))
    return together(*tables)
