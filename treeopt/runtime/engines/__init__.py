"""Other runtimes that decode here: each answers prompts greedily, alone or with the guesses of a chain or a dynamic tree.

pass    a forward of the target for the prompts that are answered together; the first of a prompt reads it
step    a pass that reads no prompt
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from treeopt.errors import Unsupported
from treeopt.runtime.drafters.protocol import Drafter
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import Target
from treeopt.trees.dynamic import AnyTree


@dataclass(frozen=True)
class Pass:
    """What one pass emitted.

    emitted      : tokens of each prompt that was answered, by its place; what comes behind the end of an answer is cut by
                   who asked
    seconds      : that it took, drafting and choosing included
    reads_prompt : whether it read some prompt or a part of it; such a pass may verify guesses already
    """

    emitted: Mapping[int, list[int]]
    seconds: float
    reads_prompt: bool


class Engine(Protocol):
    """A runtime with a target, a drafter, and a rule that says where answers end."""

    name: str
    version: str
    most_rows: int  # prompts that it answers together
    is_stepwise: bool  # whether an answer can be left after any step
    takes_trees: bool  # dynamic ones, for one prompt at a time
    own_length: int | None  # longest chain of the engine's own settings; None where it has to be told one
    without_own: str  # why its own settings are not decoded, in a sentence; empty where they are, or there are none
    about: str  # what a prediction lacks, in a sentence; empty where guesses are those that treeopt's drafter makes

    def answer(
        self, prompts: Sequence[Sequence[int]], tree: AnyTree | None, rows: int = 1
    ) -> Generator[Pass, None, None]:
        """The passes that answer some prompts, so many at a time.

        tree : a chain or a dynamic tree; the root alone is plain decoding, None the engine's own settings
        """


def open_engine(
    name: str, target: Target, drafter: Drafter, stop: StopRule, say: Callable[[str], None] = lambda message: None
) -> Engine:
    """The engine of that name. Raises Unsupported where there is none, or it cannot run the drafter.

    say : told what takes long, such as a conversion
    """
    from treeopt.export.write import runners
    from treeopt.runtime.engines import openvino, transformers

    engines: dict[str, tuple[tuple[str, ...], Callable[..., Engine]]] = {
        "transformers": (transformers.DRAFTERS, lambda *parts: transformers.Transformers(*parts[:3])),
        **{name: (openvino.DRAFTERS, openvino.opener(weights)) for name, weights in openvino.NAMES.items()},
    }
    if name not in engines:
        raise Unsupported(f"--engine must be one of {', '.join(engines)}, but got {name!r}.")
    drafters, make = engines[name]
    if drafter.kind not in drafters:
        raise Unsupported(
            f"--engine {name} decodes with drafters of the kinds {', '.join(drafters)}, but this drafter is "
            f"{drafter.kind}. It runs in {', '.join(['treeopt itself', *runners(drafter.kind)])}."
        )
    return make(target, drafter, stop, say)
