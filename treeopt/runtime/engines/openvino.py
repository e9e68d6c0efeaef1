"""OpenVINO GenAI on this processor: continuous batching, with prompt lookup, a draft model, or EAGLE-3's chains and trees.

A step of the pipeline is a pass over all requests, and what a request may be guessed is its own. Ran with 2026.4.1.0, where
trees with branches change the text unless the caches of both models are in float32, and several requests with trees end
with an error: so trees are for the exact engine, and for one request (docs/engines.md has both). A pipeline that raised an
error is not used again.

exact        all is computed in float32: the texts of every draft are plain decoding's
as it comes  nothing is forced; on a processor with bfloat16 it decodes in that, and drafts change some texts
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from treeopt.errors import InvalidInput, Unsupported
from treeopt.records.drafters import LOOKED_UP
from treeopt.runtime.drafters.draft_model import DraftModel
from treeopt.runtime.drafters.eagle3 import Eagle3Heads
from treeopt.runtime.drafters.lookup import about_lookup
from treeopt.runtime.drafters.protocol import Drafter
from treeopt.runtime.engines.conversion import Say, converted, converted_drafter
from treeopt.runtime.folder import loadable
from treeopt.runtime.stepper import Pass, Prompts, Stepper
from treeopt.runtime.stop import SequenceEnd, StopRule
from treeopt.runtime.target import Target
from treeopt.trees.draft import Draft
from treeopt.trees.tree import Tree

DRAFTERS = ("draft-model", "eagle3", "ngram")
# By the format of the target's weights; as it comes they end in -default.
NAMES = {"fp32": "openvino", "int8": "openvino-int8"}
OWN_LENGTH = 5  # guesses that `LLMPipeline.generate` asks for where nobody says how many
# Rounding decides which token is likelier, so all that can be computed in float32 is. With weights of 8 bits the engine else
# rounds activations to 8 bits as well, and a chain or a tree changes more than half of the texts.
EXACT = {"KV_CACHE_PRECISION": "f32", "INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
MOST_TOKENS = 2**20  # of a pass: no prompt is read in parts, and no request waits for others
INT8 = "The engine's target has weights of 8 bits, so the prediction is of a model that is not quite the same."
ROUNDED = (
    "The engine decodes in the precision that is its own, so its guesses and texts are not quite the predicted ones."
)


class OpenVino(Stepper):
    """A pipeline of continuous batching that guesses, and one that does not."""

    most_rows = 64

    def __init__(
        self, target: Target, drafter: Drafter, stop: StopRule, say: Say, *, weights: str, exact: bool = True
    ) -> None:
        try:
            import openvino_genai
        except ImportError:
            raise Unsupported(
                "`engine=openvino` needs openvino-genai. Install it with: pip install 'treeopt[openvino]'"
            ) from None
        self.genai: Any = openvino_genai
        self.name = NAMES[weights] + "-default" * (not exact)
        self.version: str = openvino_genai.__version__.partition("-")[0]
        self.target, self.drafter, self.stop, self.weights, self.say = target, drafter, stop, weights, say
        self.forced = {**(EXACT if exact else {}), "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        self.as_it_comes = OpenVino(target, drafter, stop, say, weights=weights, exact=False) if exact else None
        self.takes_trees = drafter.kind == "eagle3" and exact
        self.own_length = None if drafter.kind == "ngram" else OWN_LENGTH
        self.about = (
            f"{about_lookup('OpenVINO GenAI', drafter)} {INT8 * (weights != 'fp32')} {ROUNDED * (not exact)}".strip()
        )
        self._pipelines: dict[bool, Any] = {}

    def answer(
        self, prompts: Sequence[Sequence[int]], draft: Draft | None, rows: int = 1
    ) -> Generator[Pass, Draft | None, None]:
        """The passes. Who stops asking leaves the pipeline empty."""
        guesses = draft is None or draft.depth > 0
        with loadable(f"`engine={self.name}` must be able to answer", self.target.name):
            pipeline = self._pipelines.pop(guesses, None) or self._pipeline(guesses)
            requests: dict[int, Any] = {}
            try:
                yield from self._passes(pipeline, requests, list(enumerate(prompts)), self._settings(draft), rows)
            except GeneratorExit:
                _empty(pipeline, requests)
                self._pipelines[guesses] = pipeline
                raise
            self._pipelines[guesses] = pipeline  # after an error it would go on, and accept nothing

    def _passes(
        self, pipeline: Any, requests: dict[int, Any], prompts: Prompts, settings: Mapping[str, Any], rows: int
    ) -> Generator[Pass, None, None]:
        """The passes; ``requests`` are those that are being answered, by the prompt's place."""
        from openvino import Tensor

        waiting, silent = deque(prompts), set[int]()
        ends: dict[int, SequenceEnd] = {}
        while waiting or requests:
            while waiting and len(requests) < rows:
                place, prompt = waiting.popleft()
                room = self.target.context - len(prompt)
                config = self._config(settings, min(self.stop.max_new_tokens, room))
                requests[place] = pipeline.add_request(place, Tensor(np.array([prompt], dtype=np.int64)), config)
                ends[place] = SequenceEnd(self.stop, room)
                silent.add(place)
            began = time.perf_counter()
            pipeline.step()
            seconds, reads_prompt = time.perf_counter() - began, bool(silent)
            emitted = {place: _read(request) for place, request in requests.items()}
            silent -= {place for place, tokens in emitted.items() if tokens}
            if not any(emitted.values()) and not pipeline.has_non_finished_requests():
                raise InvalidInput("`engine=openvino` ended answers that had not come to an end.")
            yield Pass(emitted, seconds, reads_prompt)
            for place, tokens in emitted.items():
                ends[place].take(tokens)
            ended = {place: requests.pop(place) for place in emitted if ends[place].reason is not None}
            _empty(pipeline, ended, wait=not requests)

    def _config(self, settings: Mapping[str, Any], max_new_tokens: int) -> Any:
        config = self.genai.GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens, **settings)
        config.stop_token_ids = set(self.stop.eos_ids)
        config.ignore_eos = not self.stop.eos_ids
        if self.stop.eos_ids:  # else it is the converted model's own
            config.eos_token_id = min(self.stop.eos_ids)
        return config

    def _settings(self, tree: Draft | None) -> dict[str, object]:
        """Settings of a request: how many guesses, and in which tree."""
        tree = Tree.chain(OWN_LENGTH) if tree is None else tree
        if tree.depth == 0:
            return {}
        if tree.topk is None:
            lookup = {"max_ngram_size": LOOKED_UP} if self.drafter.kind == "ngram" else {}
            return {"num_assistant_tokens": tree.depth, **lookup}
        return {"num_assistant_tokens": tree.rows - 1, "tree_depth": tree.depth, "branching_factor": tree.topk}

    @property
    def converted(self) -> dict[str, str]:  # type: ignore[override]
        """The names of the folders of its pipelines."""
        folders = {"MODEL": converted(self.target, self.weights, self.say)}
        if isinstance(self.drafter, DraftModel | Eagle3Heads):
            folders["DRAFTER"] = converted_drafter(self.drafter, self.target, self.say)
        return {word: folder.name for word, folder in folders.items()}

    def _pipeline(self, guesses: bool) -> Any:
        """A pipeline that guesses, or one that does not."""
        with_: dict[str, object] = {"prompt_lookup": True} if guesses else {}
        if guesses and isinstance(self.drafter, DraftModel | Eagle3Heads):
            folder = converted_drafter(self.drafter, self.target, self.say)
            with_ = {"draft_model": self.genai.draft_model(str(folder), "CPU", **self.forced)}
        model, scheduler = converted(self.target, self.weights, self.say), self.genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = MOST_TOKENS
        return self.genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", {**self.forced, **with_})


def _empty(pipeline: Any, requests: Mapping[int, Any], wait: bool = True) -> None:
    """End requests that the pipeline may want to go on with, at loops for one."""
    for request in requests.values():
        request.cancel()
    while wait and pipeline.has_non_finished_requests():
        pipeline.step()


def _read(request: Any) -> list[int]:
    """The tokens that a request got in the last step."""
    return [token for output in request.read().values() for token in output.generated_ids] if request.can_read() else []


in_fp32, in_int8 = partial(OpenVino, weights="fp32"), partial(OpenVino, weights="int8")
in_own, in_int8_own = partial(in_fp32, exact=False), partial(in_int8, exact=False)
