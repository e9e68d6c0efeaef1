"""Assisted generation of transformers: its own `generate`, with a draft model or prompt lookup.

A streamer gets the tokens of every pass. Only one prompt is answered at once. Read in transformers 5.23.0:
generation/utils.py (`_assisted_decoding`), generation/candidate_generator.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from treeopt.records.drafters import LOOKED_UP
from treeopt.runtime.drafters.draft_model import DraftModel
from treeopt.runtime.folder import loadable
from treeopt.runtime.setup import Setup
from treeopt.runtime.stepper import Pass, Passes, Stepper
from treeopt.runtime.stop import SequenceEnd, StopRule
from treeopt.trees.draft import Draft

DRAFTERS = ("draft-model", "ngram")
# Of the assistant's generation config: where it is not told so, guesses end where it is not confident.
WHOLE_CHAINS = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
OTHER_ROWS = (
    "The two models have another number of rows in their vocabularies, so transformers guesses text and splits it into "
    "tokens again. The prediction may not be of these guesses."
)


class Transformers(Stepper):
    """`generate` of a target; only whole answers come out of it."""

    name, version = "transformers", transformers.__version__
    most_rows, is_stepwise = 1, False
    setup: Setup

    def __init__(self, setup: Setup) -> None:
        self.setup, self.target = setup, setup.target
        target, drafter = setup.target, setup.drafter
        self._assisted: dict[str, Any] = {}  # arguments of `generate`
        if isinstance(drafter, DraftModel):
            self._assisted = {"assistant_model": drafter.model.model}
            if drafter.model.config.vocab_size != target.config.vocab_size:
                self._assisted |= {"tokenizer": target.tokenizer, "assistant_tokenizer": drafter.model.tokenizer}
                self.about = OTHER_ROWS

    def answer(self, prompts: Sequence[Sequence[int]], draft: Draft | None, rows: int = 1) -> Passes:
        assert draft is not None, "only treeopt's own decoder goes without"
        for place, prompt in enumerate(prompts):
            stream, began = self._answer(prompt, draft.depth or len(draft.options), draft.options)
            for n, (tokens, ended) in enumerate(stream.passes[1:]):  # the stream gets the prompt first
                yield Pass({place: tokens}, ended - began, reads_prompt=n == 0)
                began = ended

    def _answer(self, prompt: Sequence[int], length: int, options: Mapping[str, Any]) -> tuple[PassStream, float]:
        """The answer with chains of ``length`` guesses, and when it began; ``options`` are those of prompt lookup that are told."""
        ids, room = torch.tensor([prompt], device=self.target.model.device), self.stop.room(prompt, self.target.context)
        asked: dict[str, object] = {"max_new_tokens": room, "do_sample": False}
        if self.stop.eos_ids:
            asked["eos_token_id"] = sorted(self.stop.eos_ids)
        if length and not self._assisted:
            lookup = {"prompt_lookup_num_tokens": length, "max_matching_ngram_size": LOOKED_UP}
            asked |= {name: value for name, value in (options or lookup).items() if name != "eos_token_id"}
        stream = PassStream(self.stop, length != 0)
        with self._settings(length), loadable("`engine=transformers` must be able to answer", self.target.name):
            began = time.perf_counter()
            self.target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=GenerationConfig(**asked, use_cache=True),
                stopping_criteria=StoppingCriteriaList([stream]),
                streamer=stream,
                **(self._assisted if length else {}),
            )
        return stream, began

    @contextmanager
    def _settings(self, length: int) -> Iterator[None]:
        """With chains of so many guesses of the assistant, and no setting that a checkpoint came with.

        Those would be taken where `generate` is not told otherwise, a penalty for repetition for one.
        """
        models, settings = [self.target.model], dict[str, Any]()
        if length and self._assisted:
            models.append(self._assisted["assistant_model"])
            settings = {"num_assistant_tokens": length, **WHOLE_CHAINS}
        kept = [model.generation_config for model in models]
        try:
            for model in models:
                model.generation_config = GenerationConfig(**settings)
            yield
        finally:
            for model, config in zip(models, kept, strict=True):
                model.generation_config = config


class PassStream(StoppingCriteria):
    """Receives the tokens of every pass, and notes when they came; it ends an answer where the rule does, at loops too.

    `generate` hands it the prompt first. With ``guesses`` tokens are streamed before they are asked about, and some
    versions ask about guesses too; without, they are asked about first.
    """

    def __init__(self, stop: StopRule, guesses: bool) -> None:
        self.passes: list[tuple[list[int], float]] = []  # tokens, and when they came
        self._watch, self._guesses = SequenceEnd(stop), guesses

    def put(self, tokens: Tensor) -> None:
        self.passes.append((tokens.flatten().tolist(), time.perf_counter()))
        if self._guesses and len(self.passes) > 1:
            self._watch.take(self.passes[-1][0])

    def end(self) -> None: ...

    def __call__(self, input_ids: Tensor, scores: Any, **others: Any) -> Tensor:
        if not self._guesses:
            self._watch.take([int(input_ids[0, -1])])
        return torch.full((len(input_ids),), self._watch.reason is not None, device=input_ids.device)
