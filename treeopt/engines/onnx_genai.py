"""ONNX Runtime GenAI: the length of a chain, as an option of a generator or of the model builder.

A generator decodes one sequence at a time with a draft model or n-grams. The model builder makes a drafter of blocks a part of
the model, which the engine for batches runs.

max_draft_tokens  the length, 1 to 16, while min_adaptive_k is 0; above 0 the engine adapts the length to its timings
ngram_size        N, of which the last N - 1 tokens must match; 0 for no look-up
num_draft_tokens  guesses of a block that is built. It verifies max_draft_tokens of them, by default 4
model.draft       in MODEL's genai_config.json: the draft model's decoder, beside that of the target
"""

from functools import partial

from treeopt.engines.base import About, Method, ServingEngine, Written
from treeopt.engines.templates import Keys, Templates, program, sampling
from treeopt.records.drafters import LOOKED_UP
from treeopt.records.plan import Ranges, only
from treeopt.trees.draft import Draft
from treeopt.trees.limits import EngineLimits

MOST_LENGTH = 16
PROGRAM = '''"""Speculative decoding with ONNX Runtime GenAI: python generate.py {arguments}"""

import json
import sys
from pathlib import Path

import onnxruntime_genai

{names} = sys.argv[1:]
settings = json.loads(Path(__file__).with_name("options.json").read_text())
model = onnxruntime_genai.Model(name)
tokenizer = onnxruntime_genai.Tokenizer(model)
tokens = tokenizer.encode(prompt)
params = onnxruntime_genai.GeneratorParams(model)
params.set_search_options(max_length=len(tokens) + 128, **settings["search"])
params.set_speculative_options(**settings["speculative"])
generator = onnxruntime_genai.Generator(model, params)
generator.append_tokens(tokens)
while not generator.is_done():
    generator.generate_next_token()
print(tokenizer.decode(generator.get_sequence(0)[len(tokens) :]))
'''
FIXED = {"min_adaptive_k": 0, "cooldown": False}  # every step drafts the plan's length


DRAFT = (
    "genai_config.json of MODEL must have the draft model's decoder as model.draft, of the same vocabulary, tokenizer and "
    "execution providers. Without it, and for plain decoding, MODEL is the target alone."
)
LOOKUP = f"It looks the last {LOOKED_UP} tokens up and no fewer, and the latest place wins."
NGRAMS = {**FIXED, "ngram_size": LOOKED_UP + 1, "ngram_chained_lookup": False}


def write(served: Ranges[Draft], about: About, drafting: Keys = FIXED, note: str = DRAFT) -> Written:
    """A chain of a generator, whose drafter has these settings."""
    length = only(served).depth
    speculative = {"max_draft_tokens": length, **drafting} if length else {}
    settings = {"search": sampling(about), "speculative": speculative}
    return program(PROGRAM, "options.json", settings, speculates=length > 0, notes=[note])


def too_short(served: Ranges[Draft], about: About) -> str | None:
    """Why a single guess of DSpark is refused."""
    if about.drafter == "dspark" and only(served).depth == 1:
        return "builds blocks of DSpark of 2 guesses or more, but this chain has 1"
    return None


PAGED = "--extra_options use_paged_attention=true aux_hidden_state_layers=LAYERS"
blocks = Templates(
    command="python -m onnxruntime_genai.models.builder --input MODEL --output BUILT --precision bf16 --execution_provider cuda",
    options={
        kind: f"{PAGED} {kind}_path=DRAFTER {kind}_num_draft_tokens={{length}} max_draft_tokens={{length}}"
        for kind in ("dflash2", "dspark")
    },
    notes=(
        "LAYERS are the target_layer_ids of DRAFTER's config.json, each plus one, with commas between them.",
        "The command builds BUILT, which onnxruntime_genai.Engine runs, and no Generator.",
    ),
)


OPTIONS = "set_speculative_options() of GeneratorParams, or speculative in genai_config.json"
SOURCE = "microsoft/onnxruntime-genai docs/SpeculativeDecoding.md, src/decoding/"
ENGINE = ServingEngine(name="onnx-genai", title="ONNX Runtime GenAI", package="onnxruntime-genai", methods=(
    Method(name="draft-model", drafters=("draft-model",), rules=("greedy", "reject"),
           checked="0.18.0", limits=EngineLimits(max_depth=MOST_LENGTH), max_batch_size=1, carrier=OPTIONS,
           source=f"{SOURCE}base_speculative_strategy.cpp, speculative_sampling.h", write=write),
    Method(name="ngram", drafters=("ngram",), rules=("greedy", "sample"),
           checked="0.18.0", limits=EngineLimits(max_depth=MOST_LENGTH), max_batch_size=1, carrier=OPTIONS,
           looks_up="from the latest place of n-grams of one size",
           source=f"{SOURCE}n_gram_lookup.h, n_gram_decoding_strategy.cpp", write=partial(write, drafting=NGRAMS, note=LOOKUP)),
    Method(name="block", drafters=tuple(blocks.options), checked="0.18.0", limits=EngineLimits(max_depth=MOST_LENGTH),
           carrier="--extra_options of its model builder",
           refuses=too_short, wider="refuses to build them", versions="0.18.0; CUDA, targets of the family Qwen",
           source="microsoft/onnxruntime-genai src/python/py/models/builders/qwen.py, block_drafter.py", write=blocks),
))  # fmt: skip
