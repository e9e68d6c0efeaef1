"""Engines of people's own machines that take a chain's length as a flag: MLC-LLM, mlx-lm and ExLlamaV3.

MLC-LLM    ``--overrides`` has the length; a tree only with spec_tree_width above 1, which stays away. A draft model's
           step takes the sequences x rows that max_num_sequence holds: too few for one sequence end the server
mlx-lm     one sequence at a time
ExLlamaV3  a library: generate.py takes the options of its own loader, ``exllamav3.model_init``
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from treeopt.errors import InvalidInput
from treeopt.export import chains
from treeopt.export.assisted import SCRIPT, sampling
from treeopt.export.engine import Lengths, Request, Written
from treeopt.files.shell import shell_word

MLC, MLX = "mlc_llm serve MODEL", "mlx_lm.server --model MODEL"
MLC_MODES = {"draft-model": "small_draft", "eagle": "eagle", "medusa": "medusa"}
EXLLAMA = f"python {SCRIPT} --model_dir MODEL"
EXLLAMA_FLAGS = {
    "draft-model": "--draft_model_dir DRAFTER",
    "dflash": "--draft_model_dir DRAFTER",
    "mtp": "--mtp",
    "ngram": "--ngram_match_min 1",
}  # treeopt's own ``ngram`` looks single tokens up too
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


def write_mlc(request: Request) -> Written:
    """The command of its server."""
    drafter = chains.drafter_of(request, MLC_MODES, "MLC-LLM")
    length = chains.only_length(request, "MLC-LLM")
    if length == 0:
        return chains.plain(MLC)
    overrides, notes = f"spec_draft_length={length}", []
    if drafter == "medusa":
        chains.within_heads(length, request, "MLC-LLM")
    if drafter == "draft-model":
        rows = request.batch_size * (1 + length)
        overrides += f";max_num_sequence={rows}"
        notes.append(
            f"max_num_sequence is {request.batch_size} sequences x {1 + length} rows: with fewer MLC-LLM leaves sequences "
            "out of a step, and ends where not even one fits."
        )
    mode = f"--additional-models DRAFTER --speculative-mode {MLC_MODES[drafter]}"
    return chains.launch(f"{MLC} {mode} --overrides {shell_word(overrides)}", notes)


def parse_mlc(files: Mapping[str, str]) -> Lengths:
    """The chain length; InvalidInput where MLC-LLM would choose one, make a tree, or not fit one sequence."""
    given = chains.flags(files)
    mode = given.get("--speculative-mode", "disable")
    if mode == "disable":
        return chains.NO_SPECULATION
    settings = dict(part.partition("=")[::2] for part in given.get("--overrides", "").split(";"))
    length, width, most = (
        chains.whole(settings.get(key, default), key)
        for key, default in (("spec_draft_length", "0"), ("spec_tree_width", "1"), ("max_num_sequence", "4"))
    )
    if length == 0:
        raise InvalidInput("MLC-LLM chooses the length at run time, or fails, unless spec_draft_length is above 0.")
    if mode == MLC_MODES["draft-model"]:
        if width != 1:
            raise InvalidInput(f"A chain needs spec_tree_width=1, but got {width}.")
        if most < 1 + length:
            raise InvalidInput(f"MLC-LLM needs max_num_sequence of at least {1 + length}, but has {most}.")
    return ((1, None, length),)


def write_mlx(request: Request) -> Written:
    """The command of its server."""
    chains.drafter_of(request, ("draft-model",), "mlx-lm")
    length = chains.only_length(request, "mlx-lm")
    if length == 0:
        return chains.plain(MLX)
    note = "A request's own num_draft_tokens goes before the flag. mlx_lm.generate takes the same flags."
    return chains.launch(f"{MLX} --draft-model DRAFTER --num-draft-tokens {length}", [note])


def parse_mlx(files: Mapping[str, str]) -> Lengths:
    """The chain length as its server reads it."""
    given = chains.flags(files)
    if "--draft-model" not in given:
        return chains.NO_SPECULATION
    return ((1, None, chains.whole(given.get("--num-draft-tokens", "3"), "--num-draft-tokens")),)


def write_exllama(request: Request) -> Written:
    """A program, and its options."""
    drafter = chains.drafter_of(request, EXLLAMA_FLAGS, "ExLlamaV3")
    length = chains.only_length(request, "ExLlamaV3")
    asked = sampling(request)
    flags = [f" --{key} {shell_word(asked[key])}" for key in ("temperature", "top_p", "top_k") if key in asked]
    end = f"{''.join(flags)}{' --temperature_first' * bool(flags)} --prompt PROMPT"
    drafting = f"{EXLLAMA} {EXLLAMA_FLAGS[drafter]} --num_draft_tokens {length}{end}"
    written = chains.launch(drafting) if length else chains.plain(EXLLAMA + end)
    return replace(written, files={**written.files, SCRIPT: PROGRAM})


def parse_exllama(files: Mapping[str, str]) -> Lengths:
    """The chain length as the loader and the generator read it; InvalidInput where they would choose one."""
    given = chains.flags(files)
    if not any(flag.split()[0] in given for flag in EXLLAMA_FLAGS.values()):
        return chains.NO_SPECULATION
    length = chains.whole(given.get("--num_draft_tokens", "0"), "--num_draft_tokens")
    if length == 0:
        raise InvalidInput("Without --num_draft_tokens ExLlamaV3 takes the drafter's own number: name the length.")
    if "--dynamic_draft" in given:
        raise InvalidInput("With --dynamic_draft ExLlamaV3 ends a chain where its drafter is unsure.")
    return ((1, None, length),)
