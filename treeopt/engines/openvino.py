"""OpenVINO GenAI: the length of a chain in a request's generation config; how guesses are made is the pipeline's argument.

With ``tree_depth`` EAGLE-3 makes a dynamic tree of so many levels, of which the best num_assistant_tokens are verified
beside the root. Every request may ask for its own: where a plan has groups, `GROUPS` has the settings of each.
"""

import json
from dataclasses import replace
from functools import partial

from treeopt.engines import chains, copied
from treeopt.engines.base import EARLIEST, About, Method, ServingEngine, Written
from treeopt.engines.chains import SCRIPT, Keys, sampling
from treeopt.records.drafters import LOOKED_UP
from treeopt.records.plan import Ranges, only
from treeopt.trees.draft import CopiedText, Draft, DynamicLimits
from treeopt.trees.limits import EngineLimits

FILE, GROUPS = "generation_config.json", "groups.json"
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
{groups}# {said}
precision = {precision}
{pipeline}config = openvino_genai.GenerationConfig(**settings, max_new_tokens=128)  # ends are the model's own
print(pipeline.generate(prompt, config))
'''
BY_GROUP = """groups = json.loads(Path(__file__).with_name("groups.json").read_text())
settings = groups[group[0]] if group else settings
"""
PIPELINE = 'pipeline = openvino_genai.LLMPipeline(name, "CPU"{guesses}, **precision)\n'
IF_GUESSED = f'if "{LENGTH}" in settings:\n    {{}}else:  # this group is not to speculate\n    {{}}'
GUESSES = {"": "", "PROMPT": ", prompt_lookup=True"}  # by the word that stands for the drafter
GUESSES["DRAFTER"] = ', draft_model=openvino_genai.draft_model(drafter, "CPU", **precision)'
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
    """A chain, or a dynamic tree of EAGLE-3, for every group of prompts that has its own too; ``lookup`` goes with n-grams."""
    looks_up = about.kind in ("ngram", copied.KIND)
    settings = _settings(only(served), about, lookup if looks_up else {})
    groups = {name: _settings(only(own), about, lookup if looks_up else {}) for name, own in about.groups.items()}
    every = [settings, *groups.values()]
    guessing = [one for one in every if LENGTH in one]
    trees = any("tree_depth" in one for one in every)
    words = ["MODEL", *["DRAFTER"] * bool(guessing and not looks_up), "PROMPT"]
    command = " ".join(words)
    exact = trees or is_exact(about)
    files = {FILE: settings, **({GROUPS: groups} if groups else {})}
    texts = {name: f"{json.dumps(content)}\n" for name, content in files.items()}
    texts[SCRIPT] = PROGRAM.format(
        arguments=" ".join([*words, *["[GROUP]"] * bool(groups)]),
        names=", ".join(["name", *["drafter"] * ("DRAFTER" in words), "prompt", *["*group"] * bool(groups)]),
        groups=BY_GROUP if groups else "",
        said=EXACTLY if exact else ROUNDING,
        precision=json.dumps(EXACT if exact else {}),
        pipeline=_pipeline(words[-2] if "DRAFTER" in words else "PROMPT", len(guessing) / len(every)),
    )
    notes = [*[IR] * ("DRAFTER" in words), EXACTLY if exact else ROUNDING]
    notes += [ONE_BY_ONE] * trees
    if groups:
        notes.append(f"Settings by group: python {SCRIPT} {command} GROUP, with one of {', '.join(groups)}.")
    written = chains.launch(f"python {SCRIPT} {command}", notes)
    if not guessing:
        written = chains.plain(f"python {SCRIPT} {command}")
    return replace(written, files={**written.files, **texts})


def _pipeline(drafter: str, share: float) -> str:
    """Program lines that make the pipeline; ``share`` of the settings speculate."""
    guesses, plain = (PIPELINE.format(guesses=GUESSES[word]) for word in (drafter, ""))
    return guesses if share == 1 else plain if share == 0 else IF_GUESSED.format(guesses, plain)


def write_copied(served: Ranges[CopiedText], about: About) -> Written:
    """Prompt lookup with the plan's options."""
    draft = only(served)
    return write(served, about, draft.options if draft.depth else {})


def _settings(draft: Draft, about: About, lookup: Keys) -> Keys:
    """What a request asks for: its sampling, and its draft if it is to speculate."""
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
method = partial(Method, checked="2026.4.1.0", heeds=("groups",), source=SOURCE, write=write)
ENGINE = ServingEngine(name="openvino", title="OpenVINO GenAI", package="openvino-genai", methods=(
    method(name="draft-model", drafters=("draft-model", "eagle3"), carrier=DRAFT_MODEL, syntax='{"num_assistant_tokens": 3}',
           derived=("assistant_confidence_threshold = 0",)),
    method(name="dynamic-tree", limits=EngineLimits(dynamic=DynamicLimits(chains=True), fills_levels="all"), drafters=("eagle3",), max_batch_size=1, carrier=DRAFT_MODEL,
           syntax='{"num_assistant_tokens": 15, "tree_depth": 5, "branching_factor": 4}',
           derived=("num_assistant_tokens = rows - 1 >= tree_depth", "KV_CACHE_PRECISION = INFERENCE_PRECISION_HINT = f32")),
    method(name="prompt-lookup", drafters=("ngram",), rules=("greedy", "sample"), carrier=PROMPT_LOOKUP,
           syntax='{"num_assistant_tokens": 3, "max_ngram_size": 3}', derived=("max_ngram_size = 3",), looks_up=EARLIEST),
    copied.method(write=write_copied, refuses=copied.refuses("openvino"), checked="2026.4.1.0", carrier=PROMPT_LOOKUP,
                  syntax='{"num_assistant_tokens": 8, "max_ngram_size": 3}', source=SOURCE),
))  # fmt: skip
