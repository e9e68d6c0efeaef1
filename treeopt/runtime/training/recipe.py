"""The recipe of each kind of heads: what is trained, how, and how that changes over a run.

Where a run stands is a share of its steps or its minutes, so that one by the clock ends with a learning rate of zero, too.

s step, from 0 · S steps in all · x share of the run that is over
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from treeopt.errors import InvalidInput
from treeopt.files.options import Options, option
from treeopt.records.drafters import RECIPES, RecipeDefaults

KINDS = tuple(RECIPES)
PRECISIONS = ("no", "bf16")
WARMUP_STEPS = 40  # most steps in which the learning rate rises; at most a tenth of the steps
CLIP_NORM = 1.0
DRAFT_VOCAB = 32_000  # as published drafters have


@dataclass(frozen=True)
class Recipe(Options):
    """How heads of one kind are trained, for so many steps, passes over the texts, or minutes."""

    heading: ClassVar[str] = "Heads and training"
    kind: str = option("what to train", "medusa-1", choices=KINDS, common=True)
    num_heads: int = option(
        "number of heads: tokens to guess beyond the next one. Of eagle3 the steps that its layer is unrolled over, of dflash the "
        "guesses of a block",
        4,
        least=1,
        flag="--heads",
        common=True,
    )
    num_layers: int | None = option(
        "residual blocks of each head; by default 1. Of dflash the layers; by default 2", least=1, flag="--layers"
    )
    draft_vocab: int | None = option(
        "tokens that eagle3 guesses: those that the answers have most often; by default 32,000, or all", least=1
    )
    steps: int | None = option("steps to train", least=1, common=True)
    epochs: float | None = option(
        "passes over the texts; by default 1, unless ``steps`` or ``minutes``", above=0, common=True
    )
    minutes: float | None = option("minutes to train. The learning rate falls over this time", above=0, common=True)
    batch_size: int = option("texts in each step", 8, least=1)
    accumulate: int = option("split each step into this many passes, to save memory", 1, least=1)
    learning_rate: float | None = option(
        "highest learning rate of the heads; by default 0.001; eagle3 and dflash 0.0005", above=0
    )
    start: str | None = option("heads of the same kind to go on from, named as a drafter is; by default new ones")
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "eagle3" and self.num_layers not in (None, 1):
            raise InvalidInput(f"`num_layers` must be 1 for eagle3, which is one layer, but got {self.num_layers}.")
        if not self.defaults.own_vocab and self.draft_vocab is not None:
            kinds = " or ".join(kind for kind in KINDS if RECIPES[kind].own_vocab)
            raise InvalidInput(f"`draft_vocab` is for `kind={kinds}`: heads of the kind {self.kind} know all tokens.")
        if self.start is not None and self.draft_vocab is not None:
            raise InvalidInput("`draft_vocab` is of new heads, but `start` names some that have theirs: leave one out.")
        lengths = [f"`{name}`" for name in ("steps", "epochs", "minutes") if getattr(self, name) is not None]
        if len(lengths) > 1:
            raise InvalidInput(f"{' and '.join(lengths)} exclude each other: give one of them.")

    def over(self, num_texts: int) -> Recipe:
        """This recipe with its epochs as steps, for so many texts to learn from.

        >>> Recipe(epochs=2, batch_size=8).over(30).steps
        8
        """
        if self.steps is not None or self.minutes is not None:
            return self
        return replace(self, steps=math.ceil((self.epochs or 1.0) * num_texts / self.batch_size), epochs=None)

    @property
    def defaults(self) -> RecipeDefaults:
        return RECIPES[self.kind]

    @property
    def layers(self) -> int:
        return self.num_layers or self.defaults.num_layers

    @property
    def guessed(self) -> int:
        return self.draft_vocab or DRAFT_VOCAB

    @property
    def peak_rate(self) -> float:
        return self.learning_rate or self.defaults.learning_rate

    def is_over(self, step: int, seconds: float) -> bool:
        """Whether step s is one too many, after so many seconds of training."""
        if self.minutes is not None:
            return seconds >= 60 * self.minutes
        return self.steps is not None and step >= self.steps

    def share(self, step: int, seconds: float) -> float:
        """x at the middle of step s, or by the clock."""
        if self.minutes is not None:
            return min(1.0, seconds / (60 * self.minutes))
        return min(1.0, (step + 0.5) / self.steps) if self.steps is not None else 0.0

    def rate(self, step: int, share: float) -> float:
        """Learning rate over its peak: a linear rise, then half a cosine down to zero.

        >>> [round(Recipe(steps=100).rate(s, s / 100), 2) for s in (0, 9, 50, 100)]
        [0.1, 0.98, 0.5, 0.0]
        """
        warmup = WARMUP_STEPS if self.steps is None else min(WARMUP_STEPS, math.ceil(self.steps / 10))
        return min((step + 1) / warmup, 1.0) * 0.5 * (1.0 + math.cos(math.pi * share))

    def record(self) -> dict[str, object]:
        resolved = {"num_layers": self.layers, "learning_rate": self.peak_rate, "teacher": self.defaults.teacher}
        return {name: value for name, value in vars(self).items() if name != "epochs"} | resolved
