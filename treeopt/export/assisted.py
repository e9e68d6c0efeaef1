"""transformers and OpenVINO GenAI: keys of a generation_config.json, and a generate.py that hands them over.

transformers     reads the length of a chain in the generation config of the model that drafts: the draft model's own, or
                 the target's own for n-grams and early exits. ``num_assistant_tokens`` given to ``generate`` is ignored,
                 and an ``assistant_early_exit`` in the file would make the exit draft with exits of its own
OpenVINO GenAI   reads it in that of the request; how guesses are made is an argument of the pipeline
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from treeopt.errors import InvalidInput
from treeopt.export import chains
from treeopt.export.engine import Lengths, Request, Written

FILE, SCRIPT = "generation_config.json", "generate.py"
LENGTH, LOOKUP, UNSURE = "num_assistant_tokens", "prompt_lookup_num_tokens", "assistant_confidence_threshold"
EXIT = re.compile(r"early-exit:([0-9]{1,6})")  # a drafter's id

TRANSFORMERS = '''"""Assisted generation with transformers: python generate.py {arguments}"""

import json
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

{names} = sys.argv[1:]
settings = json.loads(Path(__file__).with_name("generation_config.json").read_text())
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
model.generation_config.update(**settings)
{loading}inputs = tokenizer(prompt, return_tensors="pt")
tokens = model.generate(**inputs, max_new_tokens=128{options})
print(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
'''
ASSISTANT = """assistant = AutoModelForCausalLM.from_pretrained(drafter, dtype="auto")
assistant.generation_config.update(**settings)
"""
OPENVINO = '''"""Speculative decoding with OpenVINO GenAI: python generate.py {arguments}"""

import json
import sys
from pathlib import Path

import openvino_genai

{names} = sys.argv[1:]
settings = json.loads(Path(__file__).with_name("generation_config.json").read_text())
{loading}pipeline = openvino_genai.LLMPipeline(name, "CPU"{options})
config = pipeline.get_generation_config()
config.update_generation_config(**settings, max_new_tokens=128)
print(pipeline.generate(prompt, config))
'''


@dataclass(frozen=True)
class Way:
    """How a kind of drafter is asked for.

    length, settings  the key of the chain's length, and what else the file has
    argument          what stands for the drafter on the command line of generate.py
    loading, options  lines of generate.py, and arguments of its call
    """

    length: str = LENGTH
    settings: Mapping[str, Any] = field(default_factory=dict)
    argument: str = ""
    loading: str = ""
    options: str = ""


@dataclass(frozen=True)
class Library:
    """The files for a Python library; without drafting where no chain pays."""

    engine: str
    script: str
    ways: Mapping[str, Way]
    notes: tuple[str, ...] = ()

    def __call__(self, request: Request) -> Written:
        way = self.ways[chains.drafter_of(request, self.ways, self.engine)]
        length = chains.only_length(request, self.engine)
        settings = {**sampling(request), way.length: length, **way.settings} if length else sampling(request)
        way = way if length else Way()
        found = EXIT.fullmatch(request.drafter_id or "")
        drafter = found[1] if found and way.argument == "LAYER" else way.argument
        arguments = " ".join(filter(None, ("MODEL", drafter, "PROMPT")))
        text = self.script.format(
            arguments=arguments,
            names="name, drafter, prompt" if drafter else "name, prompt",
            loading=way.loading,
            options=way.options,
        )
        command = f"python {SCRIPT} {arguments}"
        written = chains.launch(command, self.notes) if length else chains.plain(command)
        return replace(written, files={**written.files, FILE: f"{json.dumps(settings)}\n", SCRIPT: text})


def sampling(request: Request) -> dict[str, Any]:
    """The keys by which a request asks for the plan's temperature; off is said too: models bring settings of their own."""
    if request.rule == "greedy":
        return {"do_sample": False}
    record = request.acceptance or {}
    temperature, top_p, top_k = (
        record.get(key) or off for key, off in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 0))
    )
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}


FIXED = {"num_assistant_tokens_schedule": "constant", UNSURE: 0.0}  # a chain is drafted to its end, as the plan counts
DRAFT = Way(argument="DRAFTER", options=', draft_model=openvino_genai.draft_model(drafter, "CPU")')

transformers_assistant = Library("transformers", TRANSFORMERS, {
    "draft-model": Way(LENGTH, FIXED, "DRAFTER", ASSISTANT, ", assistant_model=assistant"),
    "early-exit": Way(LENGTH, FIXED, "LAYER", options=", assistant_early_exit=int(drafter)"),
}, ("transformers reads these keys in the generation config of the model that drafts, and ignores num_assistant_tokens "
    "as an argument of generate: see generate.py.",))  # fmt: skip
transformers_lookup = Library(
    "transformers", TRANSFORMERS, {"ngram": Way(LOOKUP, {"max_matching_ngram_size": chains.LOOKED_UP})}
)
IR = "MODEL and DRAFTER are folders that optimum-cli export openvino wrote, with the same tokenizer."
openvino_draft = Library("OpenVINO GenAI", OPENVINO, {"draft-model": DRAFT, "eagle3": DRAFT}, (IR,))
openvino_lookup = Library(
    "OpenVINO GenAI",
    OPENVINO,
    {"ngram": Way(LENGTH, {"max_ngram_size": chains.LOOKED_UP}, options=", prompt_lookup=True")},
)


def parse_transformers(files: Mapping[str, str]) -> Lengths:
    """The chain length as ``generate`` picks its drafter: early exit, prompt lookup, then an assistant.

    Raises InvalidInput for a chain that would end early or change its length, and for what transformers refuses.
    """
    calls, settings = _calls(files), _settings(files)
    given = calls.get("model.generate", frozenset())
    own = settings if "model.generation_config.update" in calls else {}
    assistants = settings if "assistant.generation_config.update" in calls else {}
    if "assistant_early_exit" in own:
        raise InvalidInput("With assistant_early_exit in the model's file an exit drafts with exits of its own.")
    if "assistant_early_exit" not in given and own.get(LOOKUP) is not None:
        return ((1, None, _whole(own, LOOKUP)),)
    if not given & {"assistant_early_exit", "assistant_model"}:
        return chains.NO_SPECULATION
    drafts = own if "assistant_early_exit" in given else assistants
    if drafts.get("num_assistant_tokens_schedule", "constant") != "constant":
        raise InvalidInput("Only the schedule constant keeps the length of a chain.")
    if drafts.get(UNSURE, 0.4) != 0:
        raise InvalidInput(f"A chain stops where its drafter is unsure unless {UNSURE} is 0.")
    return ((1, None, _whole({LENGTH: 20, **drafts}, LENGTH)),)


def parse_openvino(files: Mapping[str, str]) -> Lengths:
    """The chain length as the pipeline takes it.

    Raises InvalidInput for what its config's check refuses, and where it would choose a length of its own.
    """
    calls, settings = _calls(files), _settings(files)
    given = calls.get("openvino_genai.LLMPipeline", frozenset())
    read = settings if "config.update_generation_config" in calls else {}
    if not given & {"draft_model", "prompt_lookup"}:
        return chains.NO_SPECULATION
    length = _whole(read, LENGTH)
    if read.get(UNSURE, 0):
        raise InvalidInput(f"OpenVINO GenAI takes {LENGTH} or {UNSURE}, not both.")
    if ("prompt_lookup" in given) != (read.get("max_ngram_size", 0) > 0):
        raise InvalidInput("max_ngram_size must be above 0 for prompt lookup, and 0 without it.")
    return ((1, None, length),)


def _whole(settings: Mapping[str, Any], key: str) -> int:
    length = settings.get(key)
    if type(length) is not int or length < 1:
        raise InvalidInput(f"{key} must be a whole number of at least 1, but is {length!r}.")
    return length


def _settings(files: Mapping[str, str]) -> dict[str, Any]:
    try:
        settings = json.loads(files.get(FILE, "{}"))
    except json.JSONDecodeError as error:
        raise InvalidInput(f"{FILE} must be JSON: {error}.") from None
    if not isinstance(settings, dict):
        raise InvalidInput(f"{FILE} must have a JSON object.")
    return settings


def _calls(files: Mapping[str, str]) -> dict[str, frozenset[str | None]]:
    """The functions that generate.py calls, by their text, and the keywords that each is given."""
    try:
        nodes = list(ast.walk(ast.parse(files.get(SCRIPT, ""))))
    except (SyntaxError, ValueError) as error:
        raise InvalidInput(f"{SCRIPT} must be Python: {error}.") from None
    return {ast.unparse(n.func): frozenset(k.arg for k in n.keywords) for n in nodes if isinstance(n, ast.Call)}
