"""OpenVINO GenAI: the length of a chain in a request's generation config; how guesses are made is the pipeline's argument.

With ``tree_depth`` EAGLE-3 makes a dynamic tree of so many levels, of which the best num_assistant_tokens are verified
beside the root.
"""

from dataclasses import replace

from treeopt.engines import chains
from treeopt.engines.base import Method, Request, ServingEngine, Written
from treeopt.engines.programs import Library, Way
from treeopt.records.drafters import LOOKED_UP

LENGTH = "num_assistant_tokens"
PROGRAM = '''"""Speculative decoding with OpenVINO GenAI: python generate.py {arguments}"""

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
ROUNDING = (
    "A CPU with bfloat16 decodes in it, and with weights of 8 bits activations are rounded to 8 bits: texts may then differ "
    'from those of the model alone. With INFERENCE_PRECISION_HINT="f32" and DYNAMIC_QUANTIZATION_GROUP_SIZE="0" as arguments '
    "of LLMPipeline they are the same."
)
IR = "MODEL and DRAFTER are folders that optimum-cli export openvino wrote, with the same tokenizer."
DRAFT = Way(LENGTH, argument="DRAFTER", options=', draft_model=openvino_genai.draft_model(drafter, "CPU")')
ONE_BY_ONE = "Trees are for one request at a time: in 2026.4.1.0 several together end with an error of PaKVReorder."
TREE = Way(
    LENGTH,
    argument="DRAFTER",
    loading='exact = {"KV_CACHE_PRECISION": "f32"}  # with any other a tree changes what is generated\n',
    options=', draft_model=openvino_genai.draft_model(drafter, "CPU", **exact), **exact',
)
draft = Library("OpenVINO GenAI", PROGRAM, {"draft-model": DRAFT, "eagle3": DRAFT}, (IR, ROUNDING))
LOOKUP = Way(LENGTH, {"max_ngram_size": LOOKED_UP}, options=", prompt_lookup=True")
lookup = Library("OpenVINO GenAI", PROGRAM, {"ngram": LOOKUP}, (ROUNDING,))


def write_tree(request: Request) -> Written:
    """A dynamic tree of EAGLE-3; a chain is written as one."""
    tree = chains.only(request.dynamics, "OpenVINO GenAI takes one dynamic tree")
    if tree is None or tree.topk == 1:
        return draft(replace(request, lengths=((1, None, tree.levels if tree else 0),)))
    way = replace(TREE, settings={"tree_depth": tree.levels, "branching_factor": tree.topk})
    write = Library("OpenVINO GenAI", PROGRAM, {"eagle3": way}, (IR, ROUNDING, ONE_BY_ONE))
    return write(replace(request, lengths=((1, None, tree.rows - 1),)))


SOURCE = "openvinotoolkit/openvino.genai src/cpp/src/generation_config.cpp, src/cpp/src/sampling/sampler.cpp"
DRAFT_MODEL = "generation_config.json, draft_model of LLMPipeline()"
ENGINE = ServingEngine(name="openvino", title="OpenVINO GenAI", package="openvino-genai", methods=(
    Method(name="draft-model", checked="2026.4.1.0", drafters=tuple(draft.ways), carrier=DRAFT_MODEL,
           syntax='{"num_assistant_tokens": 3}', derived=("assistant_confidence_threshold = 0",), source=SOURCE, write=draft),
    Method(name="dynamic-tree", checked="2026.4.1.0", dynamic=True, fills_levels="all", drafters=("eagle3",), max_batch_size=1,
           carrier=DRAFT_MODEL, syntax='{"num_assistant_tokens": 15, "tree_depth": 5, "branching_factor": 4}',
           derived=("num_assistant_tokens = rows - 1 >= tree_depth", "KV_CACHE_PRECISION = f32"), source=SOURCE,
           write=write_tree),
    Method(name="prompt-lookup", checked="2026.4.1.0", drafters=tuple(lookup.ways), rules=("greedy", "sample"),
           carrier="generation_config.json, prompt_lookup of LLMPipeline()",
           syntax='{"num_assistant_tokens": 3, "max_ngram_size": 3}', derived=("max_ngram_size = 3",), source=SOURCE,
           write=lookup),
))  # fmt: skip
