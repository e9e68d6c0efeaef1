"""All engines, read from this folder: a new one is a file with `ENGINE` (or `ENGINES`), and nothing else knows its name."""

import re
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from treeopt.engines.base import Method, ServingEngine
from treeopt.errors import InvalidInput, Unsupported, meant

MARK = re.compile(r"^(ENGINES?) = ", re.M)  # in a file that is of an engine


def _engines() -> Iterable[ServingEngine]:
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if found := MARK.search(path.read_text(encoding="utf-8")):
            told = getattr(import_module(f"treeopt.engines.{path.stem}"), found[1])
            yield from told if isinstance(told, tuple) else (told,)


ENGINES: dict[str, ServingEngine] = {
    engine.name: engine for engine in sorted(_engines(), key=lambda engine: engine.name)
}


def method_of(engine: str, drafter: str | None = None, method: str | None = None) -> Method:
    """The method of an engine that runs a kind of drafter, or the one that is named.

    Without a drafter the engine's usual one. Raises Unsupported for a name that is not known, InvalidInput for
    a drafter that the engine or the method cannot run.

    >>> method_of("vllm", "medusa").limits.shape
    'chain'
    >>> method_of("tgi", "redrafter")
    Traceback (most recent call last):
    treeopt.errors.InvalidInput: tgi runs drafters of the kinds medusa, ngram, but this drafter is redrafter. It runs in \
redrafter.
    """
    if engine not in ENGINES:
        raise Unsupported(f"An engine must be one of {', '.join(ENGINES)}, but got {engine!r}.{meant(engine, ENGINES)}")
    methods = ENGINES[engine].methods
    named = [one for one in methods if method in (None, one.name)]
    if not named:
        known = ", ".join(one.name for one in methods)
        raise Unsupported(
            f"`method` of {engine} must be one of {known}, but got {method!r}.{meant(method, [one.name for one in methods])}"
        )
    for one in named:
        if drafter is None or drafter in one.drafters:
            return one
    kinds = dict.fromkeys(kind for one in named for kind in one.drafters)
    able = f" It runs in {', '.join(others)}." if (others := runners(drafter)) else ""
    way = engine if method is None else f"{engine} with {method}"
    raise InvalidInput(f"{way} runs drafters of the kinds {', '.join(kinds)}, but this drafter is {drafter}.{able}")


def tree_method_of(engine: str, drafter: str | None, rule: str, batch_sizes: Iterable[int]) -> Method | None:
    """The engine's method of dynamic trees for a kind of drafter, a rule and batch sizes; None where it has none.

    >>> tree_method_of("sglang", "eagle3", "greedy", [8]).name, tree_method_of("vllm", "eagle3", "greedy", [8])
    ('dynamic-tree', None)
    """
    most = max(batch_sizes, default=1)
    able = (one for one in ENGINES[engine].methods if one.limits.dynamic and one.decodes(most))
    return next((one for one in able if drafter in one.drafters and rule in one.rules), None)


def grows_trees(drafter: str | None) -> bool:
    """Whether an engine grows dynamic trees of a kind of drafter.

    >>> grows_trees("eagle3"), grows_trees("medusa")
    (True, False)
    """
    return any(one.limits.dynamic and drafter in one.drafters for engine in ENGINES.values() for one in engine.methods)


def runners(drafter: str | None) -> list[str]:
    """The engines that run a kind of drafter; all without a kind.

    >>> runners("redrafter")
    ['redrafter']
    """
    return [name for name, one in ENGINES.items() if any(drafter in (None, *way.drafters) for way in one.methods)]


def search_for(method: Method) -> str:
    """The command that plans what a method takes."""
    named = f" --method {method.name}" if len(ENGINES[method.engine].methods) > 1 else ""
    return f"treeopt search --for {method.engine}{named}"


def removal_notes(method: Method) -> list[str]:
    """A note where the engine's newest releases have not got a method any more.

    >>> removal_notes(method_of("vllm", "medusa"))
    ['This way into vLLM was removed upstream in 0.33.0; it is for releases up to 0.32.0.']
    """
    if method.status == "live":
        return []
    return [f"This way into {ENGINES[method.engine].title} was {method.status}; it is for {method.versions}."]
