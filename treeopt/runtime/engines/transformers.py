"""Assisted generation of transformers: its own `generate`, with a draft model, prompt lookup or DFlash.

A streamer gets the tokens of every pass. Only one prompt is answered at once. Read in transformers 5.23.0:
generation/utils.py (`_assisted_decoding`), generation/candidate_generator.py, models/muse_glimmer_assistant, its DFlash.
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

from treeopt.errors import Unsupported
from treeopt.records.drafters import LOOKED_UP
from treeopt.runtime.drafters.dflash import DFlashHeads
from treeopt.runtime.drafters.draft_model import DraftModel
from treeopt.runtime.drafters.protocol import Drafter
from treeopt.runtime.folder import loadable
from treeopt.runtime.stepper import Pass, Passes, Stepper
from treeopt.runtime.stop import SequenceEnd, StopRule
from treeopt.runtime.target import Target
from treeopt.trees.draft import Draft

DRAFTERS = ("draft-model", "ngram", "dflash")
# Of the assistant's generation config: where it is not told otherwise, guesses end where it is not confident.
SETTINGS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
OTHER_ROWS = (
    "The two models have another number of rows in their vocabularies, so transformers guesses text and splits it into "
    "tokens again. The prediction may not be of these guesses."
)
UNBOUNDED = (
    "The engine's own settings are not decoded: num_assistant_tokens_schedule of the assistant is {!r}, so its chains have "
    "no longest one."
)


class Transformers(Stepper):
    """`generate` of a target; only whole answers come out of it."""

    name, version = "transformers", transformers.__version__
    most_rows, is_stepwise = 1, False

    def __init__(self, target: Target, drafter: Drafter, stop: StopRule) -> None:
        self.target, self.kind, self.stop = target, drafter.kind, stop
        self.assistant: Any = None  # the model whose generation config has the settings
        self._assisted: dict[str, Any] = {}  # arguments of `generate`
        self._own: Mapping[str, Any] = {}
        if isinstance(drafter, DFlashHeads):
            self._assisted = {"assistant_model": dflash_assistant(target, drafter)}
            self.by_width = True
        elif isinstance(drafter, DraftModel):
            self.assistant = drafter.model.model
            self._assisted = {"assistant_model": self.assistant}
            if drafter.model.config.vocab_size != target.config.vocab_size:
                self._assisted |= {"tokenizer": target.tokenizer, "assistant_tokenizer": drafter.model.tokenizer}
                self.about = OTHER_ROWS
            config = self.assistant.generation_config
            self._own = {name: getattr(config, name) for name in SETTINGS}
            self.own_stops = self._own[SETTINGS[2]] != 0
            if self._own[SETTINGS[1]] in (None, "constant"):  # others have no longest chain
                self.own_length = self._own[SETTINGS[0]] or config._get_default_generation_params()[SETTINGS[0]]
            else:
                self.without_own = UNBOUNDED.format(self._own[SETTINGS[1]])

    def answer(self, prompts: Sequence[Sequence[int]], draft: Draft | None, rows: int = 1) -> Passes:
        for place, prompt in enumerate(prompts):
            options = {} if draft is None else draft.options
            stream, began = self._answer(prompt, None if draft is None else draft.depth or len(options), options)
            for n, (tokens, ended) in enumerate(stream.passes[1:]):  # the stream gets the prompt first
                yield Pass({place: tokens}, ended - began, reads_prompt=n == 0)
                began = ended

    def _answer(
        self, prompt: Sequence[int], length: int | None, options: Mapping[str, Any]
    ) -> tuple[PassStream, float]:
        """The answer with chains of ``length`` guesses, and when it began; ``options`` are those of prompt lookup that are told."""
        ids, room = torch.tensor([prompt], device=self.target.model.device), self.stop.room(prompt, self.target.context)
        asked: dict[str, object] = {"max_new_tokens": room, "do_sample": False}
        if self.stop.eos_ids:
            asked["eos_token_id"] = sorted(self.stop.eos_ids)
        told = dict(zip(SETTINGS, (length, "constant", 0.0), strict=True)) if self.assistant and length else {}
        if length != 0 and self.kind == "ngram":
            lookup = {"prompt_lookup_num_tokens": length, "max_matching_ngram_size": LOOKED_UP}
            asked |= {name: value for name, value in (options or lookup).items() if name != "eos_token_id"}
        elif length is not None and length != 0 and self.kind == "dflash":
            asked["speculation_type"], self._assisted["assistant_model"].config.block_size = "dflash", length + 1
        stream = PassStream(self.stop, length != 0)
        with self._settings(told), loadable("`engine=transformers` must be able to answer", self.target.name):
            began = time.perf_counter()
            self.target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=GenerationConfig(**asked, use_cache=True),
                stopping_criteria=StoppingCriteriaList([stream]),
                streamer=stream,
                **(self._assisted if length != 0 else {}),
            )
        return stream, began

    @contextmanager
    def _settings(self, told: Mapping[str, object]) -> Iterator[None]:
        """With these settings of the assistant, or its own, and no other setting that a checkpoint came with.

        Those would be taken where `generate` is not told otherwise, a penalty for repetition for one.
        """
        models = (self.target.model, self.assistant or self.target.model)
        kept = [model.generation_config for model in models]
        try:
            for model in models:
                model.generation_config = GenerationConfig(**(told or self._own))
            yield
        finally:
            for model, config in zip(models, kept, strict=True):
                model.generation_config = config


def dflash_assistant(target: Target, drafter: DFlashHeads) -> Any:
    """transformers' own DFlash with a drafter's weights, whose storage is used. Raises Unsupported for one that it drafts otherwise with."""
    from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    form, like, embeddings = drafter.form, drafter.config, target.model.get_input_embeddings()
    window = max((window or 0 for window in form.windows), default=0)
    has_own = not drafter.shares_projection or not torch.equal(drafter.embedding, embeddings.weight)
    reasons = {
        "guesses from the newest token's own row": form.from_anchor,
        "has rows that do not see those behind them": any(form.causal) or 0 < window < drafter.block_rows,
        "reads the target behind its last layer": target.num_layers in form.layers,
        "has an lm_head, a vocabulary or embeddings of its own": has_own or drafter.token_ids is not None,
        "is for a target that scales its embeddings": type(embeddings) is not torch.nn.Embedding,
    }
    if found := [reason for reason, is_so in reasons.items() if is_so]:
        raise Unsupported(
            f"transformers drafts with DFlash's usual form alone, but this drafter {found[0]}. It runs in treeopt itself: leave "
            "`engine` out."
        )
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    others = ("head_dim", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "hidden_act")
    config = MuseGlimmerAssistantConfig(
        **{name: getattr(like, name) for name in (*sizes, *others)},
        layer_types=["sliding_attention" if one else "full_attention" for one in form.windows],
        sliding_window=max(window - 1, 0),  # here how many places away a row sees
        target_layer_ids=[layer - 1 for layer in form.layers],
        mask_token_id=form.mask_id,
        block_size=drafter.block_rows,
    )
    with torch.device("meta"):
        made = MuseGlimmerAssistantModel(config)
    made.rotary_emb = drafter.rotary
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    made.load_state_dict({names.get(name, name): weight for name, weight in drafter.weights.items()}, assign=True)
    return made.eval()


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
