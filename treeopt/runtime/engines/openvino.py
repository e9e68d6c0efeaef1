"""OpenVINO GenAI on this processor: continuous batching, with prompt lookup, a draft model, or EAGLE-3's chains and trees.

A step of the pipeline is a pass over all requests, and what a request may be guessed is its own. Ran with 2026.4.1.0, where
trees with branches change the text unless the caches of both models are in float32, and several requests with trees end
with an error: so trees are for the exact engine, and for one request (docs/engines.md has both). A pipeline that raised an
error is not used again.

exact        all is computed in float32: the texts of every draft are plain decoding's
as it comes  nothing is forced; on a processor with bfloat16 it decodes in that, and drafts change some texts

Models and drafters are read as optimum-intel converts them, from the user's cache, where a folder is named for the weights that
it was made from. optimum-intel needs other versions than treeopt does, so it has an environment of its own: its `optimum-cli` is
run where it is on PATH, and elsewhere what is not converted yet is refused with the command to run.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treeopt.errors import InvalidInput, Unsupported
from treeopt.files.places import user_cache
from treeopt.files.shell import command_line
from treeopt.files.writing import LOCK, folder_made_once, locked
from treeopt.records.drafters import LOOKED_UP
from treeopt.runtime.checkpoints.eagle3 import publish_eagle3
from treeopt.runtime.checkpoints.save import write_tensors
from treeopt.runtime.drafters.draft_model import DraftModel
from treeopt.runtime.drafters.eagle3 import Eagle3Heads, Form
from treeopt.runtime.folder import loadable, other_environment
from treeopt.runtime.setup import Setup
from treeopt.runtime.stepper import Pass, Passes, Stepper
from treeopt.runtime.stop import SequenceEnd
from treeopt.runtime.target import Target
from treeopt.trees.draft import Draft

DRAFTERS = ("draft-model", "eagle3", "ngram")
# By the format of the target's weights; as it comes they end in -default.
NAMES = {"fp32": "openvino", "int8": "openvino-int8"}
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
    setup: Setup

    def __init__(self, setup: Setup, *, weights: str, exact: bool = True) -> None:
        try:
            import openvino_genai
        except ImportError:
            raise Unsupported(
                "`engine=openvino` needs openvino-genai. Install it with: pip install 'treeopt[openvino]'"
            ) from None
        self.genai: Any = openvino_genai
        self.name = NAMES[weights] + "-default" * (not exact)
        self.version: str = openvino_genai.__version__.partition("-")[0]
        assert setup.drafter is not None, "an engine guesses by a drafter"
        self.setup, self.target, self.drafter, self.weights = setup, setup.target, setup.drafter, weights
        self.forced = {**(EXACT if exact else {}), "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        self.as_it_comes = OpenVino(setup, weights=weights, exact=False) if exact else None
        self.takes_trees = self.drafter.kind == "eagle3" and exact
        self.about = f"{INT8 * (weights != 'fp32')} {ROUNDED * (not exact)}".strip()
        self._pipelines: dict[bool, Any] = {}

    def answer(self, prompts: Sequence[Sequence[int]], draft: Draft | None, rows: int = 1) -> Passes:
        """The passes. Who stops asking leaves the pipeline empty."""
        assert draft is not None, "only treeopt's own decoder goes without"
        guesses = len(draft) > 1
        with loadable(f"`engine={self.name}` must be able to answer", self.target.name):
            pipeline = self._pipelines.pop(guesses, None) or self._pipeline(guesses)
            requests: dict[int, Any] = {}
            try:
                yield from self._passes(pipeline, requests, prompts, self._settings(draft), rows)
            except GeneratorExit:
                _empty(pipeline, requests)
                self._pipelines[guesses] = pipeline
                raise
            self._pipelines[guesses] = pipeline  # after an error it would go on, and accept nothing

    def _passes(
        self,
        pipeline: Any,
        requests: dict[int, Any],
        prompts: Sequence[Sequence[int]],
        settings: Mapping[str, Any],
        rows: int,
    ) -> Passes:
        """The passes; ``requests`` are those that are being answered, by the prompt's place."""
        from openvino import Tensor

        waiting, silent = deque(enumerate(prompts)), set[int]()
        ends: dict[int, SequenceEnd] = {}
        while waiting or requests:
            while waiting and len(requests) < rows:
                place, prompt = waiting.popleft()
                room = self.stop.room(prompt, self.target.context)
                config = self._config(settings, room)
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

    def _settings(self, tree: Draft) -> dict[str, object]:
        if tree.options or tree.depth == 0:
            return dict(tree.options)
        if tree.topk is None:
            lookup = {"max_ngram_size": LOOKED_UP} if self.drafter.kind == "ngram" else {}
            return {"num_assistant_tokens": tree.depth, **lookup}
        return {"num_assistant_tokens": tree.rows - 1, "tree_depth": tree.depth, "branching_factor": tree.topk}

    def _pipeline(self, guesses: bool) -> Any:
        with_: dict[str, object] = {"prompt_lookup": True} if guesses else {}
        if guesses and isinstance(self.drafter, DraftModel | Eagle3Heads):
            folder = converted_drafter(self.drafter, self.target)
            with_ = {"draft_model": self.genai.draft_model(str(folder), "CPU", **self.forced)}
        model, scheduler = converted(self.target, self.weights), self.genai.SchedulerConfig()
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


OPENVINO, OPTIMUM_INTEL = "2026.4.1", "2.2.0"
MODEL_FILE = "openvino_model.xml"
TASK = "text-generation-with-past"


def converted(target: Target, weights: str) -> Path:
    """The folder with a causal LM as OpenVINO reads it, its tokenizer beside it.

    weights : fp32 or int8
    """

    def save(folder: Path) -> None:
        target.model.save_pretrained(folder)
        target.tokenizer.save_pretrained(folder)

    about = (target.config.to_json_string(), target.model.generation_config.to_json_string(), _words(target.tokenizer))
    digest = _digest(target.model.state_dict().items(), *about)
    return _made(f"{target.name} ({weights})", f"{digest}-{weights}", save, ("--weight-format", weights))


def converted_drafter(drafter: DraftModel | Eagle3Heads, target: Target) -> Path:
    """The folder with a draft model or EAGLE-3's layer as OpenVINO reads it."""
    if isinstance(drafter, DraftModel):
        return converted(drafter.model, "fp32")
    read, form = drafter.layers_of(target.num_layers), drafter.form
    if form != Form(form.width, form.vocab_size, layers=form.layers) or len(read) != 3 or min(read) < 1:
        raise Unsupported(
            "OpenVINO GenAI takes EAGLE-3 layers as its authors publish them, which read three of the target's layers. This "
            "drafter is another: decode with it in treeopt itself."
        )
    # GenAI reads outputs where the authors' code reads inputs, so it has to be told (docs/engines.md).
    outputs = [layer - 1 for layer in read]
    _, tensors, said = publish_eagle3(drafter, "eagle-3", target.name)
    config = {key: value for key, value in (said or {}).items() if key != "eagle_config"}
    if drafter.token_ids is None:
        tensors |= {"d2t": torch.zeros(form.vocab_size, dtype=torch.long), "t2d": torch.ones(form.vocab_size) > 0}

    def save(folder: Path) -> None:
        write_tensors(folder / "model.safetensors", tensors)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")

    digest = _digest(tensors.items(), json.dumps([config, outputs]))
    options = ("--weight-format", "fp32", "--trust-remote-code")  # optimum-intel's own code: nothing is fetched
    folder = _made("the EAGLE-3 layer", f"{digest}-eagle3", save, options)
    name_layers(folder, outputs)
    return folder


def _made(what: str, name: str, save: Callable[[Path], object], options: Sequence[str]) -> Path:
    """The folder of that name in the cache, converted by the `optimum-cli` on PATH where it is missing.

    Raises Unsupported, with the command to run, where there is none or it fails. The model to convert is saved beside it.
    """
    folder = user_cache() / "openvino" / f"{name}-{OPENVINO}-{OPTIMUM_INTEL}"
    if (folder / MODEL_FILE).is_file():
        return folder
    source = folder.with_name(f"{folder.name}-source")
    with folder_made_once(source) as made:
        if made is not None:
            with loadable(f"{what} must be written for its conversion", source.name):
                save(made)
    words = ("optimum-cli", "export", "openvino", "--model", source, "--task", TASK, *options)
    refusal = (
        f"OpenVINO reads {what} as optimum-intel converts it. In an environment with optimum-intel[openvino]=={OPTIMUM_INTEL} and "
        f"openvino=={OPENVINO} (docs/engines.md), which is another than treeopt's, run this, and then the same command again: "
        f"{command_line(*words, folder)}"
    )
    if shutil.which("optimum-cli") is None:
        raise Unsupported(refusal)
    with folder_made_once(folder) as made:
        if made is not None:
            command = [*map(str, words), str(made)]
            result = subprocess.run(command, capture_output=True, text=True, env=other_environment())
            if result.returncode:
                end = result.stderr.strip().rpartition("\n")[2]
                raise Unsupported(f"optimum-cli ended with {result.returncode}: {end}. {refusal}")
    if not (folder / MODEL_FILE).is_file():  # a conversion by hand that was cut off
        raise Unsupported(refusal)
    return folder


def name_layers(folder: Path, outputs: Sequence[int]) -> None:
    """Say in an EAGLE-3 model which of the target's outputs it reads, where it does not say so yet."""
    import openvino

    file, named = folder / MODEL_FILE, folder / "named.xml"
    with locked(folder.with_name(f"{folder.name}{LOCK}")):
        model = openvino.Core().read_model(file)
        if model.has_rt_info("hidden_layers_list"):
            return
        model.set_rt_info(list(outputs), "hidden_layers_list")
        openvino.save_model(model, named, compress_to_fp16=False)
        del model  # it holds the file of weights
        for suffix in (".bin", ".xml"):
            named.with_suffix(suffix).replace(file.with_suffix(suffix))


def _words(tokenizer: Any) -> str:
    with tempfile.TemporaryDirectory() as place:
        tokenizer.save_pretrained(place)
        return "".join(file.read_text(encoding="utf-8") for file in sorted(Path(place).rglob("*")) if file.is_file())


def _digest(tensors: Iterable[tuple[str, Tensor]], *texts: str) -> str:
    """Hex digest of all numbers of some tensors, their names, and some texts."""
    digest = hashlib.sha256("\0".join(texts).encode())
    for name, tensor in tensors:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
