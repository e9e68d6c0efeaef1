"""ExLlamaV3, a library: generate.py takes the options of its own loader, ``exllamav3.model_init``."""

from collections.abc import Mapping
from dataclasses import replace

from treeopt.engines import copied
from treeopt.engines.base import About, Method, ServingEngine, Written
from treeopt.engines.templates import SCRIPT, Templates, sampling
from treeopt.files.shell import shell_word
from treeopt.records.plan import Ranges, for_all, only
from treeopt.trees.draft import CopiedText, Draft
from treeopt.trees.tree import Tree

PROGRAM = '''"""Generation with ExLlamaV3: python generate.py, the options of its own loader, and --prompt PROMPT"""

import sys
from argparse import ArgumentParser

from exllamav3 import Generator, model_init

parser = ArgumentParser()
greedy = {"temperature": 0.0, "min_p": 0.0}
model_init.add_args(parser, add_sampling_args=True, default_sampling_args=greedy, add_draft_model_args=True)
parser.add_argument("--prompt", required=True)
args = parser.parse_args()
model, config, cache, tokenizer, draft_model, _, draft_cache = model_init.init(args)
generator = Generator(
    model,
    cache,
    tokenizer,
    draft_model=draft_model,
    draft_cache=draft_cache,
    num_draft_tokens=args.num_draft_tokens,
    ngram_match_min=args.ngram_match_min,
    dynamic_draft_tokens=args.dynamic_draft,
)
sampler = model_init.get_arg_sampler(args)
prompt, is_chat = args.prompt, False
try:
    prompt, is_chat = tokenizer.hf_render_chat_template([{"role": "user", "content": prompt}]), True
except (ImportError, ValueError) as error:  # without transformers, or without a template
    print(f"The prompt is given as it is: {error}", file=sys.stderr)
text = generator.generate(
    prompt,
    128,
    sampler=sampler,
    encode_special_tokens=is_chat,
    stop_conditions=config.eos_token_id_list,
    add_bos=not is_chat,
    completion_only=True,
)
print(text)
'''


FLAGS = {  # treeopt's own ``ngram`` looks single tokens up too
    "draft-model": "--draft_model_dir DRAFTER",
    "dflash": "--draft_model_dir DRAFTER",
    "mtp": "--mtp",
    "ngram": "--ngram_match_min 1",
}


def write(served: Ranges[Draft], about: About, drafters: Mapping[str, str] = FLAGS) -> Written:
    """generate.py and its launch command; ``drafters`` has the flags of each kind of drafter."""
    settings, end = sampling(about), ""
    for key in ("temperature", "top_p", "top_k"):
        if key in settings:
            end += f" --{key} {shell_word(settings[key])}"
    if end:
        end += " --temperature_first"
    end += " --prompt PROMPT"
    command = f"python {SCRIPT} --model_dir MODEL"
    options = {kind: f"{flag} --num_draft_tokens {{length}}{end}" for kind, flag in drafters.items()}
    written = Templates(command=command, alone=command + end, options=options)(served, about)
    return replace(written, files={**written.files, SCRIPT: PROGRAM})


def write_copied(served: Ranges[CopiedText], about: About) -> Written:
    """The program with the options of look-up, whose length ``num_draft_tokens`` is the chain's."""
    draft = only(served)
    if draft.depth == 0:
        return write(served, about)
    options = draft.options
    length = options.pop("num_draft_tokens", draft.depth)
    return write(for_all(Tree.chain(length)), about, {copied.KIND: copied.flags(options, "_").strip()})


ENGINE = ServingEngine(name="exllamav3", title="ExLlamaV3", package="exllamav3", methods=(
    Method(name="generator", checked="1.6.5", drafters=tuple(FLAGS), rules=("greedy", "sample"),
           carrier="num_draft_tokens of Generator()", looks_up="from where the longest match, however long, first ended",
           source="turboderp-org/exllamav3 exllamav3/generator/generator.py, exllamav3/model_init.py", write=write),
    copied.method("exllamav3", write=write_copied, checked="1.6.5", carrier="num_draft_tokens and ngram_match_min of Generator()",
                  source="turboderp-org/exllamav3 exllamav3/generator/generator.py, exllamav3/model_init.py"),
))  # fmt: skip
