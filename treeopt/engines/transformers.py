"""transformers: the length of a chain in the generation config of the model that drafts.

That is the draft model, or the target for n-grams. ``generate`` ignores ``num_assistant_tokens`` among its arguments.
"""

from treeopt.engines import copied
from treeopt.engines.base import EARLIEST, About, Method, ServingEngine, Written
from treeopt.engines.templates import Keys, program, sampling
from treeopt.records.drafters import LOOKED_UP
from treeopt.records.plan import Ranges, for_all, only
from treeopt.trees.draft import CopiedText, Draft
from treeopt.trees.tree import Tree

PROGRAM = '''"""Assisted generation with transformers: python generate.py {arguments}"""

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
FIXED = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}  # drafted to its end
NOTE = (
    "transformers reads these keys in the generation config of the model that drafts, and ignores num_assistant_tokens "
    "as an argument of generate: see generate.py."
)


NGRAMS = {"max_matching_ngram_size": LOOKED_UP}
FILE, LOOKUP = "generation_config.json", "prompt_lookup_num_tokens"


def write(served: Ranges[Draft], about: About) -> Written:
    """A draft model's chain."""
    length = only(served).depth
    drafting = {"num_assistant_tokens": length, **FIXED} if length else {}
    loading, options = (ASSISTANT, ", assistant_model=assistant, **both") if length else ("", "")
    settings, drafts = {**sampling(about), **drafting}, length > 0
    return program(
        PROGRAM, FILE, settings, speculates=drafts, drafter=drafts, notes=[NOTE], loading=loading, options=options
    )


def write_lookup(served: Ranges[Draft], about: About, options: Keys = NGRAMS) -> Written:
    """Prompt lookup with these options."""
    length = only(served).depth
    drafting = {LOOKUP: length, **options} if length else {}
    settings = {**sampling(about), **drafting}
    return program(PROGRAM, FILE, settings, speculates=length > 0, loading="", options="")


def write_copied(served: Ranges[CopiedText], about: About) -> Written:
    """Prompt lookup with the plan's options; the ends of a sequence are the model's own."""
    draft = only(served)
    options = dict(draft.options) if draft.depth else {}
    chain = Tree.chain(options.pop(LOOKUP, draft.depth))
    options.pop("eos_token_id", None)
    return write_lookup(for_all(chain), about, options)


SOURCE = "huggingface/transformers src/transformers/generation/candidate_generator.py, utils.py"
ENGINE = ServingEngine(name="transformers", title="transformers", package="transformers", server="transformers serve",
                       methods=(
    Method(name="assistant", checked="5.23.0", drafters=("draft-model",), rules=("greedy", "reject"), max_batch_size=1,
           carrier="generation_config.json of the drafting model, assistant_model of generate()",
           source=SOURCE, write=write),
    Method(name="prompt-lookup", checked="5.23.0", drafters=("ngram",), rules=("greedy", "sample"), max_batch_size=1,
           carrier="generation_config.json, or arguments of generate()", looks_up=EARLIEST, source=SOURCE, write=write_lookup),
    copied.method("transformers", write=write_copied, checked="5.23.0", max_batch_size=1,
                  carrier="generation_config.json, or arguments of generate()", source=SOURCE),
))  # fmt: skip
