"""transformers and OpenVINO GenAI: keys of a generation_config.json, and a generate.py that hands them over.

transformers     reads the length of a chain in the generation config of the model that drafts: the draft model's own, or
                 the target's own for n-grams and early exits. ``num_assistant_tokens`` given to ``generate`` is ignored,
                 and an ``assistant_early_exit`` in the file would make the exit draft with exits of its own
OpenVINO GenAI   reads it in that of the request; how guesses are made is an argument of the pipeline. With ``tree_depth``
                 EAGLE-3 makes a dynamic tree of so many levels, of which the best num_assistant_tokens are verified beside
                 the root
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from treeopt.errors import InvalidInput, quoted
from treeopt.export import chains, dynamic
from treeopt.export.engine import Lengths, Request, Settings, Written
from treeopt.trees.dynamic import DynamicTree

FILE, SCRIPT = "generation_config.json", "generate.py"
LEVELS, TOPK = "tree_depth", "branching_factor"
LENGTH, LOOKUP, UNSURE = "num_assistant_tokens", "prompt_lookup_num_tokens", "assistant_confidence_threshold"
EXIT = re.compile(r"early-exit(?::0*([1-9][0-9]{0,5}))?")  # a drafter's id

TRANSFORMERS = '''"""Assisted generation with transformers: python generate.py {arguments}"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

{names} = sys.argv[1:]
settings = json.loads(Path(__file__).with_name("generation_config.json").read_text())
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").to(device)
ends = model.generation_config.eos_token_id
padding = ends[0] if isinstance(ends, list) else ends  # drafters do not see any other padding in the prompt
model.generation_config = GenerationConfig(**settings, eos_token_id=ends, pad_token_id=padding)
{loading}if tokenizer.chat_template:
    messages = [{{"role": "user", "content": prompt}}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not tokenizer.chat_template).to(device)
tokens = model.generate(**inputs, max_new_tokens=128{options})
print(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
'''
ASSISTANT = """assistant = AutoModelForCausalLM.from_pretrained(drafter, dtype="auto").to(device)
assistant.generation_config = GenerationConfig(**settings)
both = {}
if assistant.config.get_text_config().vocab_size != model.config.get_text_config().vocab_size:
    both = {"tokenizer": tokenizer, "assistant_tokenizer": AutoTokenizer.from_pretrained(drafter)}
"""
OPENVINO = '''"""Speculative decoding with OpenVINO GenAI: python generate.py {arguments}"""

import json
import sys
from pathlib import Path

import openvino_genai

{names} = sys.argv[1:]
settings = json.loads(Path(__file__).with_name("generation_config.json").read_text())
{loading}pipeline = openvino_genai.LLMPipeline(name, "CPU"{options})
config = openvino_genai.GenerationConfig(**settings, max_new_tokens=128)  # ends are the model's own
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
        drafter = layer(request.drafter_id) if way.argument == "LAYER" else way.argument
        length = chains.only_length(request, self.engine)
        settings = {**sampling(request), way.length: length, **way.settings} if length else sampling(request)
        way, drafter = (way, drafter) if length else (Way(), "")
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


def layer(drafter_id: str | None) -> str:
    """The layer of an early exit; a placeholder where the plan names none."""
    found = EXIT.fullmatch("early-exit" if drafter_id is None else drafter_id)
    if found is None:
        raise InvalidInput(
            f"An early exit must be named early-exit:LAYER, but the plan has {quoted(drafter_id)}: calibrate again."
        )
    return found[1] or "LAYER"


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
    "draft-model": Way(LENGTH, FIXED, "DRAFTER", ASSISTANT, ", assistant_model=assistant, **both"),
    "early-exit": Way(LENGTH, FIXED, "LAYER", options=", assistant_early_exit=int(drafter)"),
}, ("transformers reads these keys in the generation config of the model that drafts, and ignores num_assistant_tokens "
    "as an argument of generate: see generate.py.",))  # fmt: skip
transformers_lookup = Library(
    "transformers", TRANSFORMERS, {"ngram": Way(LOOKUP, {"max_matching_ngram_size": chains.LOOKED_UP})}
)
ROUNDING = (
    "A CPU with bfloat16 decodes in it, and with weights of 8 bits activations are rounded to 8 bits: texts may then differ "
    'from those of the model alone. With INFERENCE_PRECISION_HINT="f32" and DYNAMIC_QUANTIZATION_GROUP_SIZE="0" as arguments '
    "of LLMPipeline they are the same."
)
IR = "MODEL and DRAFTER are folders that optimum-cli export openvino wrote, with the same tokenizer."
openvino_draft = Library("OpenVINO GenAI", OPENVINO, {"draft-model": DRAFT, "eagle3": DRAFT}, (IR, ROUNDING))
openvino_lookup = Library(
    "OpenVINO GenAI",
    OPENVINO,
    {"ngram": Way(LENGTH, {"max_ngram_size": chains.LOOKED_UP}, options=", prompt_lookup=True")},
    (ROUNDING,),
)


ONE_BY_ONE = "Trees are for one request at a time: in 2026.4.1.0 several together end with an error of PaKVReorder."
TREE = Way(
    argument="DRAFTER",
    loading='exact = {"KV_CACHE_PRECISION": "f32"}  # with any other a tree changes what is generated\n',
    options=', draft_model=openvino_genai.draft_model(drafter, "CPU", **exact), **exact',
)


def openvino_tree(request: Request) -> Written:
    """A dynamic tree of EAGLE-3; a chain is written as one."""
    chains.drafter_of(request, ("eagle3",), "OpenVINO GenAI's dynamic trees")
    tree = dynamic.only_setting(request, "OpenVINO GenAI")
    if tree is None or tree.topk == 1:
        return openvino_draft(replace(request, lengths=((1, None, tree.levels if tree else 0),)))
    way = replace(TREE, settings={LEVELS: tree.levels, TOPK: tree.topk})
    return Library("OpenVINO GenAI", OPENVINO, {"eagle3": way}, (IR, ROUNDING, ONE_BY_ONE))(
        replace(request, lengths=((1, None, tree.rows - 1),))
    )


def parse_transformers(files: Mapping[str, str]) -> Lengths:
    """The chain length as ``generate`` picks its drafter: early exit, prompt lookup, then an assistant.

    Raises InvalidInput for a chain that would end early or change its length, and for what transformers refuses.
    """
    calls, settings = _calls(files), _settings(files)
    given = calls.get("model.generate", frozenset())
    own = settings if "model.generation_config" in calls else {}
    assistants = settings if "assistant.generation_config" in calls else {}
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
    read = settings if "openvino_genai.GenerationConfig" in calls else {}
    if not given & {"draft_model", "prompt_lookup"}:
        return chains.NO_SPECULATION
    length = _whole(read, LENGTH)
    if read.get(UNSURE, 0):
        raise InvalidInput(f"OpenVINO GenAI takes {LENGTH} or {UNSURE}, not both.")
    if ("prompt_lookup" in given) != (read.get("max_ngram_size", 0) > 0):
        raise InvalidInput("max_ngram_size must be above 0 for prompt lookup, and 0 without it.")
    return ((1, None, length),)


def parse_openvino_tree(files: Mapping[str, str]) -> Settings:
    """The dynamic tree as the pipeline takes it; InvalidInput for what its config's check refuses."""
    ((_, _, nodes),) = parse_openvino(files)
    settings = _settings(files)
    if not nodes:
        return dynamic.NO_SPECULATION
    if not settings.get(LEVELS):
        return ((1, None, DynamicTree(nodes, 1, nodes + 1)),)
    levels, topk = _whole(settings, LEVELS), _whole({TOPK: 1, **settings}, TOPK)
    if nodes < levels:
        raise InvalidInput(f"{LENGTH} must be at least {LEVELS}, {levels}, but is {nodes}.")
    if settings.get("do_sample") or settings.get("num_beams", 1) != 1:
        raise InvalidInput("OpenVINO GenAI builds trees for greedy decoding only: do_sample false, num_beams 1.")
    return ((1, None, DynamicTree(levels, topk, nodes + 1)),)


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
    """What generate.py calls, or assigns the result of a call to, by its text, and the keywords of the call."""
    try:
        nodes = list(ast.walk(ast.parse(files.get(SCRIPT, ""))))
    except (SyntaxError, ValueError) as error:
        raise InvalidInput(f"{SCRIPT} must be Python: {error}.") from None
    calls = [(n.func, n) for n in nodes if isinstance(n, ast.Call)]
    calls += [
        (to, n.value) for n in nodes if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call) for to in n.targets
    ]
    return {ast.unparse(name): frozenset(k.arg for k in call.keywords) for name, call in calls}
