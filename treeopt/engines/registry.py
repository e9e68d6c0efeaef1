"""All engines, read from this folder. A new engine is a file with `ENGINE` or `ENGINES`; nothing else knows its name."""

import re
from collections.abc import Collection, Iterable, Iterator
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from treeopt.engines.base import Method, ServingEngine
from treeopt.errors import InvalidInput, Unsupported, meant
from treeopt.files.options import Options, with_given

O = TypeVar("O", bound=Options)  # noqa: E741

MARK = re.compile(r"^(ENGINES?) = ", re.M)  # in the file of an engine


def _engines() -> Iterable[ServingEngine]:
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if mark := MARK.search(path.read_text(encoding="utf-8")):
            engines = getattr(import_module(f"treeopt.engines.{path.stem}"), mark[1])
            yield from engines if isinstance(engines, tuple) else (engines,)


ENGINES: dict[str, ServingEngine] = {
    engine.name: engine for engine in sorted(_engines(), key=lambda engine: engine.name)
}
ALIASES = {"trtllm": "tensorrt-llm", "arctic": "vllm"}  # beside names, titles and servers


def engine_named(name: str, known: Collection[str] = tuple(ENGINES)) -> str:
    """The one of the known engines that a name means, however it is spelt. Raises Unsupported for a name that means none.

    >>> [engine_named(name) for name in ("TensorRT-LLM", "trtllm", "llama.cpp", "vLLM", "arctic")]
    ['tensorrt-llm', 'tensorrt-llm', 'llama-cpp', 'vllm', 'vllm']
    >>> engine_named("trt", known=["vllm", "rtp-llm", "tensorrt-llm"])
    Traceback (most recent call last):
    treeopt.errors.Unsupported: engine must be one of vllm, rtp-llm, tensorrt-llm, but got 'trt'. Did you mean 'tensorrt-llm'?
    """
    letters, spellings = _letters(name), _spellings(known)
    if letters in spellings:
        return spellings[letters]
    begun = [spelling for spelling in spellings if letters and spelling.startswith(letters)]
    near = begun or get_close_matches(letters, spellings, 1)
    likeliest = engine_of(name, known) or (spellings[min(near, key=len)] if near else None)
    hint = f" Did you mean {likeliest!r}?" if likeliest else ""
    raise Unsupported(f"`engine` must be one of {', '.join(known)}, but got {name!r}.{hint}")


def engine_of(runtime: str, known: Collection[str] = tuple(ENGINES)) -> str | None:
    """The engine whose name a runtime's begins with; None where it begins with none.

    >>> engine_of("vLLM 0.26"), engine_of("TRT-LLM 1.2"), engine_of("mine")
    ('vllm', 'tensorrt-llm', None)
    """
    letters, spellings = _letters(runtime), _spellings(known)
    begins = [spelling for spelling in spellings if letters.startswith(spelling)]
    return spellings[max(begins, key=len)] if begins else None


def runtime_named(name: str) -> str:
    """A runtime's name: that of an engine where it means one, else as it is.

    >>> runtime_named("vLLM"), runtime_named("vllm-0.11")
    ('vllm', 'vllm-0.11')
    """
    return _spellings(tuple(ENGINES)).get(_letters(name), name)


def with_engine(options: O, known: Collection[str] = tuple(ENGINES)) -> O:
    """Options with the engine that theirs means; as they are where they name none."""
    name = options.given.get("engine")
    return options if name is None else with_given(options, engine=engine_named(name, known))


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _spellings(known: Collection[str]) -> dict[str, str]:
    """Each way to write an engine, in lower-case letters and digits, to its name."""
    titles = {title: name for name, engine in ENGINES.items() for title in (engine.title, engine.server)}
    others = {_letters(other): name for other, name in {**titles, **ALIASES}.items() if other and name in known}
    return others | {_letters(name): name for name in known}


def method_of(engine: str, drafter: str | None = None, method: str | None = None) -> Method:
    """The method of an engine that runs a kind of drafter, or the named one; without a drafter the engine's usual one.

    Raises Unsupported for an unknown name, InvalidInput for a drafter that the engine or the method cannot run.

    >>> method_of("tensorrt-llm", "medusa").limits.shape
    'any'
    >>> method_of("tgi", "redrafter")
    Traceback (most recent call last):
    treeopt.errors.InvalidInput: tgi runs drafters of the kinds medusa, ngram, but this drafter is redrafter. It runs in \
redrafter.
    """
    serving = ENGINES[engine_named(engine)]
    methods = {candidate.name: candidate for candidate in serving.methods}
    if method is not None and method not in methods:
        raise Unsupported(
            f"`method` of {serving.name} must be one of {', '.join(methods)}, but got {method!r}.{meant(method, methods)}"
        )
    candidates = list(methods.values()) if method is None else [methods[method]]
    for candidate in candidates:
        if not drafter or drafter in candidate.drafters:
            return candidate
    kinds = dict.fromkeys(kind for candidate in candidates for kind in candidate.drafters)
    subject = serving.name if method is None else f"{serving.name} with {method}"
    others = runners(drafter)
    cure = f" It runs in {', '.join(others)}." if others else ""
    raise InvalidInput(f"{subject} runs drafters of the kinds {', '.join(kinds)}, but this drafter is {drafter}.{cure}")


def tree_method_of(engine: str, drafter: str | None, rule: str, batch_sizes: Iterable[int]) -> Method | None:
    """The engine's method of dynamic trees for a kind of drafter, a rule and batch sizes; None if it has none.

    >>> tree_method_of("sglang", "eagle3", "greedy", [8]).name, tree_method_of("vllm", "eagle3", "greedy", [8])
    ('dynamic-tree', None)
    """
    largest = max(batch_sizes, default=1)
    for method in ENGINES[engine].methods:
        fits = drafter in method.drafters and rule in method.rules and method.decodes(largest)
        if method.limits.dynamic and fits:
            return method
    return None


def methods_for(drafter: str | None) -> Iterator[Method]:
    """The methods that run a kind of drafter; all if it is None.

    >>> any(method.limits.dynamic for method in methods_for("eagle3")), any(m.limits.dynamic for m in methods_for("medusa"))
    (True, False)
    """
    for engine in ENGINES.values():
        yield from (method for method in engine.methods if drafter is None or drafter in method.drafters)


def runners(drafter: str | None) -> list[str]:
    """The engines that run a kind of drafter; all engines if it is None.

    >>> runners("redrafter")
    ['redrafter']
    """
    return list(dict.fromkeys(method.engine for method in methods_for(drafter)))


def search_for(method: Method) -> str:
    """The command that plans what a method takes."""
    option = f" --method {method.name}" if len(ENGINES[method.engine].methods) > 1 else ""
    return f"treeopt search --for {method.engine}{option}"


def removal_notes(method: Method) -> list[str]:
    """A note if the engine's newest releases do not have the method any more.

    >>> removal_notes(method_of("tensorrt-llm", "medusa"))
    ['TensorRT-LLM took trees in TensorRT engines, up to 1.2; newer releases take none: removed upstream in PR #15918.']
    """
    if method.status == "live":
        return []
    title = ENGINES[method.engine].title
    return [f"{title} took trees in {method.versions}; newer releases take none: {method.status}."]
