"""Other runtimes that decode here: each answers one prompt at a time, greedily, alone or with a chain of guesses.

length  guesses ahead; 0 is plain decoding, None the engine's own settings, which may change from step to step
pass    a forward of the target; the first reads the prompt, and may verify guesses already
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from treeopt.errors import Unsupported
from treeopt.runtime.drafters.protocol import Drafter
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import Target


@dataclass(frozen=True)
class Passes:
    """What an engine emitted for one prompt.

    tokens  : of every pass; what comes behind the end of the answer is cut by who asked
    ended_s : when every pass had ended, since the prompt was given
    """

    tokens: list[list[int]]
    ended_s: list[float]


class Engine(Protocol):
    """A runtime with a target, a drafter, and a rule that says where answers end."""

    name: str
    version: str
    own_length: int | None  # longest chain of the engine's own settings; None where it has to be told one
    without_own: str  # why its own settings are not decoded, in a sentence; empty where they are, or there are none
    about: str  # what a prediction lacks, in a sentence; empty where guesses are those that treeopt's drafter makes

    def answer(self, prompt: Sequence[int], length: int | None) -> Passes: ...


def open_engine(name: str, target: Target, drafter: Drafter, stop: StopRule) -> Engine:
    """The engine of that name. Raises Unsupported where there is none, or it cannot run the drafter."""
    from treeopt.export.write import runners
    from treeopt.runtime.engines import transformers

    engines: dict[str, tuple[tuple[str, ...], Callable[[Target, Drafter, StopRule], Engine]]] = {
        "transformers": (transformers.DRAFTERS, transformers.Transformers)
    }
    if name not in engines:
        raise Unsupported(f"--engine must be one of {', '.join(engines)}, but got {name!r}.")
    drafters, make = engines[name]
    if drafter.kind not in drafters:
        raise Unsupported(
            f"--engine {name} decodes with drafters of the kinds {', '.join(drafters)}, but this drafter is "
            f"{drafter.kind}. It runs in {', '.join(['treeopt itself', *runners(drafter.kind)])}."
        )
    return make(target, drafter, stop)
