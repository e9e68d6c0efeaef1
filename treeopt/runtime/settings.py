"""What a session is opened with: a model, its drafter, prompts, and a rule of acceptance. Importing it is light."""

from __future__ import annotations

from typing import Annotated, TypedDict

from treeopt.files.parameters import Range

RULE_OPTIONS = ("acceptance", "temperature", "top_p", "top_k", "epsilon", "delta", "draft_depth")


class ModelOptions(TypedDict, total=False):
    """Options that load a model, and the rule it decodes by; `calibrate` puts them into the trace.

    model         : folder, GGUF file or hub id of the target, or smollm2; by default the run's, or the demo
    drafter       : folder, file or hub id of heads or of a draft model, or a name (treeopt list drafters); by default the
                    model's own heads, or the first shipped
    dtype         : number format: float64, float32, bfloat16 or float16; by default float32 on CPU
    device        : where the model is: cpu, cuda, cuda:1 and so on; by default cuda where there is one
    device_map    : spread the model over devices: auto, balanced ... (needs accelerate)
    revision      : revision of a hub model
    trust_remote_code : run a hub model's own code
    engine_python : Python of the environment that has vllm, for engine=vllm; by default this one
    prompts       : a .jsonl, .json, .csv, .parquet or .txt file, a folder, a datasets id, or demo
    column        : column that holds the prompt or conversation; by default the first known name
    group_by      : column to report groups by, for example category
    responses     : column of given answers; they are read in one pass, and nothing is generated
    split         : split of a datasets id
    chat_template : put the tokenizer's chat template around prompts, where it has one
    in_order      : take prompts as they stand in the file, not shuffled
    seed          : seed of the prompts' order, of sampling and of training; by default 0
    acceptance    : rule: greedy; sample (lossless, at ``temperature``); reject (the same with chains of a draft model, by p/q
                    rejection); typical (Medusa's); by default greedy
    temperature   : sampling temperature; with ``responses`` that of the answers; by default 1.0; typical 0.7
    top_p         : with sample and reject: sample from the likeliest tokens of this total probability
    top_k         : with sample and reject: sample from this many of the likeliest tokens
    epsilon       : threshold of typical acceptance; by default 0.09
    delta         : entropy factor of typical acceptance; by default the square root of epsilon
    draft_depth   : how many tokens a draft model, EAGLE, MTP or ngram guesses ahead; by default 5. Of DFlash it is the width
                    of the block too; by default as wide as it was trained
    """

    drafter: str
    dtype: str
    device: str
    device_map: str
    revision: str
    prompts: str
    column: str
    group_by: str
    responses: str
    split: str
    chat_template: bool
    seed: int
    in_order: bool
    trust_remote_code: bool
    engine_python: str
    acceptance: str
    temperature: Annotated[float, Range(0)]
    top_p: float
    top_k: int
    epsilon: float
    delta: float
    draft_depth: int
