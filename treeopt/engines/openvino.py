"""OpenVINO GenAI: the length of a chain in a request's generation config; the pipeline's argument says how guesses are made.

With ``tree_depth`` EAGLE-3 makes a dynamic tree of so many levels. The best num_assistant_tokens of its nodes are verified, with
the root.
"""

import json
from functools import partial

from treeopt.engines import copied
from treeopt.engines.base import EARLIEST, About, Method, ServingEngine, Written
from treeopt.engines.templates import Keys, program, sampling
from treeopt.records.drafters import LOOKED_UP
from treeopt.records.plan import Ranges, only
from treeopt.trees.draft import CopiedText, Draft, DynamicLimits
from treeopt.trees.limits import EngineLimits

FILE = "generation_config.json"
LENGTH, LOOKUP = "num_assistant_tokens", {"max_ngram_size": LOOKED_UP}
EXACT = {"KV_CACHE_PRECISION": "f32", "INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
OWN_PRECISION = "-default"  # ends the names of runtimes that decode in the precision that the processor likes best
PROGRAM = '''"""Speculative decoding with OpenVINO GenAI: python generate.py {arguments}"""

import json
import sys
from pathlib import Path

import openvino_genai

{names} = sys.argv[1:]
settings = json.loads(Path(__file__).with_name("generation_config.json").read_text())
# {computing}
precision = {precision}
pipeline = openvino_genai.LLMPipeline(name, "CPU"{guesses}, **precision)
config = openvino_genai.GenerationConfig(**settings, max_new_tokens=128)  # ends are the model's own
print(pipeline.generate(prompt, config))
'''
FROM_DRAFTER = ', draft_model=openvino_genai.draft_model(drafter, "CPU", **precision)'
FROM_PROMPT = ", prompt_lookup=True"
EXACTLY = (
    "All is computed in float32, so that texts are those of the model alone. Without it a CPU with bfloat16 is faster, and "
    "some texts differ; trees need it."
)
ROUNDING = (
    "The precision is the CPU's own: with bfloat16, or with weights of 8 bits, some texts differ from those of the model alone. "
    f"With precision = {json.dumps(EXACT)} they are the same."
)
IR = "MODEL and DRAFTER are folders that optimum-cli export openvino wrote, with the same tokenizer."
ONE_BY_ONE = "Trees are for one request at a time: in 2026.4.1.0 several together end with an error of PaKVReorder."


def write(served: Ranges[Draft], about: About, lookup: Keys = LOOKUP) -> Written:
    """A chain, or a dynamic tree of EAGLE-3. ``lookup`` has the settings of n-grams."""
    draft = only(served)
    looks_up, is_tree = about.drafter in ("ngram", copied.KIND), (draft.topk or 1) > 1
    loads, exact = bool(draft.depth and not looks_up), is_tree or is_exact(about)
    guesses = FROM_DRAFTER if loads else FROM_PROMPT if draft.depth else ""
    computing = EXACTLY if exact else ROUNDING
    notes = [*([IR] if loads else []), computing, *([ONE_BY_ONE] if is_tree else [])]
    settings, precision = _settings(draft, about, lookup if looks_up else {}), json.dumps(EXACT if exact else {})
    holes = {"computing": computing, "precision": precision, "guesses": guesses}
    return program(PROGRAM, FILE, settings, speculates=draft.depth > 0, drafter=loads, notes=notes, **holes)


def write_copied(served: Ranges[CopiedText], about: About) -> Written:
    """Prompt lookup with the plan's options."""
    draft = only(served)
    return write(served, about, draft.options if draft.depth else {})


def _settings(draft: Draft, about: About, lookup: Keys) -> Keys:
    """The settings of a request: its sampling, and its draft if it is to speculate."""
    settings = sampling(about)
    if draft.depth == 0:
        return settings
    if (draft.topk or 1) > 1:
        return {**settings, LENGTH: draft.rows - 1, "tree_depth": draft.depth, "branching_factor": draft.topk}
    return {**settings, LENGTH: draft.depth, **lookup}


def is_exact(about: About) -> bool:
    """Whether a plan was made with the latencies of this engine in float32: `runtime.engines.openvino` has its names."""
    name = (about.runtime or {}).get("name") or ""
    return name.startswith("openvino") and not name.endswith(OWN_PRECISION)


SOURCE = "openvinotoolkit/openvino.genai src/cpp/src/generation_config.cpp, src/cpp/src/sampling/sampler.cpp"
DRAFT_MODEL = "generation_config.json, draft_model of LLMPipeline()"
PROMPT_LOOKUP = "generation_config.json, prompt_lookup of LLMPipeline()"
method = partial(Method, checked="2026.4.1.0", source=SOURCE, write=write)
ENGINE = ServingEngine(name="openvino", title="OpenVINO GenAI", package="openvino-genai", methods=(
    method(name="draft-model", drafters=("draft-model", "eagle3"), carrier=DRAFT_MODEL),
    method(name="dynamic-tree", limits=EngineLimits(dynamic=DynamicLimits(), fills_levels="all"), drafters=("eagle3",), max_batch_size=1,
           carrier=DRAFT_MODEL),
    method(name="prompt-lookup", drafters=("ngram",), rules=("greedy", "sample"), carrier=PROMPT_LOOKUP, looks_up=EARLIEST),
    copied.method("openvino", write=write_copied, checked="2026.4.1.0", carrier=PROMPT_LOOKUP, source=SOURCE),
))  # fmt: skip
