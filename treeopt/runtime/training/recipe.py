"""The recipe of each kind of heads: what is trained, how, and how that changes over a run.

A run is as long as its steps or its minutes say; where it stands is a share of that, from 0 to 1, so that a
run by the clock also ends with a learning rate of zero.

s step, from 0 · S steps in all · x share of the run that is over
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from treeopt.errors import InvalidInput

MEDUSA_1, MEDUSA_SHARED, MEDUSA_2 = "medusa-1", "medusa-shared", "medusa-2"
HYDRA, HYDRA_PLUS, EAGLE_3 = "hydra", "hydra++", "eagle3"
PRECISIONS = ("no", "bf16", "fp16")
WARMUP_STEPS = 40  # most steps in which the learning rate rises; at most a tenth of the steps
HEADS_ALONE = 0.25  # share of a Medusa-2 run in which the base is left as it is
JOINT_WEIGHT = 0.2  # lambda_0 (Medusa, section 2.2.2), reached at the end of the run
BASE_RATE = 0.25  # learning rate of the base over that of the heads (Medusa, section 2.2.2)
CLIP_NORM = 1.0
DRAFT_VOCAB = 32_000  # as published drafters have


@dataclass(frozen=True)
class Defaults:
    """What a kind of heads is trained with unless the user says otherwise.

    decay   : weight of head k's loss is decay**k: 0.8 in Medusa, section 2.2.1, and in EAGLE-3's code, where head k is
              step k of the layer; in Hydra's code all are alike
    teacher : learn the base's distribution instead of the text's tokens (Hydra++, EAGLE-3)
    """

    num_layers: int
    learning_rate: float
    decay: float
    teacher: bool = False


DEFAULTS: Mapping[str, Defaults] = {
    MEDUSA_1: Defaults(1, 1e-3, 0.8),
    MEDUSA_SHARED: Defaults(1, 1e-3, 0.8),
    MEDUSA_2: Defaults(1, 2e-3, 0.8),
    HYDRA: Defaults(1, 1e-3, 1.0),
    HYDRA_PLUS: Defaults(4, 1e-3, 1.0, teacher=True),
    EAGLE_3: Defaults(1, 5e-4, 0.8, teacher=True),
}
KINDS = tuple(DEFAULTS)


@dataclass(frozen=True)
class Recipe:
    """How heads of one kind are trained.

    num_heads     : of EAGLE-3, whose layer makes all guesses, the steps that it is unrolled over
    num_layers    : blocks of a head; None for the kind's own number
    learning_rate : peak of the heads'; None for the kind's own. The base of Medusa-2 learns with a quarter
    steps, epochs, minutes : it is over after so many steps, passes over the texts, or minutes of training; one
                    of them, by default one pass
    batch_size    : texts of a step, over all processes and passes
    accumulate    : passes that a step's texts are spread over, which changes memory, not the result
    draft_vocab   : of EAGLE-3: how many tokens it guesses, the commonest of the answers; None for at most `DRAFT_VOCAB`
    """

    kind: str = MEDUSA_1
    num_heads: int = 4
    num_layers: int | None = None
    steps: int | None = None
    epochs: float | None = None
    minutes: float | None = None
    batch_size: int = 8
    accumulate: int = 1
    learning_rate: float | None = None
    seed: int = 0
    draft_vocab: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in DEFAULTS:
            raise InvalidInput(f"--kind must be one of {', '.join(KINDS)}, but got {self.kind!r}.")
        for name in ("num_heads", "num_layers", "steps", "batch_size", "accumulate", "draft_vocab"):
            value = getattr(self, name)
            if value is not None and value < 1:
                option = name.removeprefix("num_").replace("_", "-")
                raise InvalidInput(f"--{option} must be at least 1, but got {value}.")
        for name in ("epochs", "minutes", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InvalidInput(f"--{name.replace('_', '-')} must be above 0, but got {value}.")
        if self.kind == EAGLE_3 and self.num_layers not in (None, 1):
            raise InvalidInput(f"--layers must be 1 for {EAGLE_3}, which is one layer, but got {self.num_layers}.")
        if self.kind != EAGLE_3 and self.draft_vocab is not None:
            raise InvalidInput(f"--draft-vocab is for --kind {EAGLE_3}: heads of the kind {self.kind} know all tokens.")
        lengths = [f"--{name}" for name in ("steps", "epochs", "minutes") if getattr(self, name) is not None]
        if len(lengths) > 1:
            raise InvalidInput(
                f"{' and '.join(lengths)} exclude each other, as each says how long to train: give one of them."
            )

    def over(self, num_texts: int) -> Recipe:
        """The same with its epochs as steps, for so many texts to learn from.

        >>> Recipe(epochs=2, batch_size=8).over(30).steps
        8
        """
        if self.steps is not None or self.minutes is not None:
            return self
        return replace(self, steps=math.ceil((self.epochs or 1.0) * num_texts / self.batch_size), epochs=None)

    @property
    def defaults(self) -> Defaults:
        return DEFAULTS[self.kind]

    @property
    def layers(self) -> int:
        return self.num_layers or self.defaults.num_layers

    @property
    def peak_rate(self) -> float:
        """Learning rate of the heads at its highest."""
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

    def heads_alone(self, share: float) -> bool:
        """Whether the base waits: always, but in the later part of a Medusa-2 run."""
        return self.kind != MEDUSA_2 or share < HEADS_ALONE

    def joint_weight(self, share: float) -> float:
        """Weight of the heads' loss beside the base's: 1 while they learn alone, then a sine up to lambda_0.

        >>> recipe = Recipe("medusa-2", steps=1)
        >>> [round(recipe.joint_weight(x), 3) for x in (0.0, 0.25, 0.5, 1.0)]
        [1.0, 0.0, 0.1, 0.2]
        """
        if self.heads_alone(share):
            return 1.0
        return JOINT_WEIGHT * math.sin(math.pi / 2 * (share - HEADS_ALONE) / (1 - HEADS_ALONE))

    def record(self) -> dict[str, Any]:
        """All that a run depends on, for files."""
        resolved = {"num_layers": self.layers, "learning_rate": self.peak_rate, "teacher": self.defaults.teacher}
        return {name: value for name, value in vars(self).items() if name != "epochs"} | resolved
