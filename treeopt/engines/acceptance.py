"""Files that other tools take in place of a real drafter: engines that accept guesses by chance, and simulators.

survival    : (K,) share of the steps that accept the first 1, ... K guesses of a chain of K, rounded
conditional : (K,) share that accepts each guess, of the steps that accept those before it
accepted    :      sum of survival · tokens: 1 + accepted, with the target's own
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from treeopt import __version__
from treeopt.engines.llama_cpp import DRAFT

NAME = "acceptance"  # as --to takes it
DIGITS = 4
Survivals = Sequence[Sequence[float]]  # of the lengths 1, 2, ...


@dataclass(frozen=True)
class Form:
    """The file of one tool.

    meaning : where its numbers go and what they mean, a comment of the file
    line    : the template of a line for each length, up to ``most`` · heading: the template of what precedes a group's lines
    """

    title: str
    checked: str
    file: str
    meaning: str
    line: str
    most: int | None = None
    heading: str = "# Prompts: {name}"


FORMS = (
    Form("vLLM", "0.33.0", "vllm.txt", "Keys of --speculative-config, beside method and model. Survival, without the target's own "
         "token; each request draws guess by guess, to the first miss. Older releases take one number, synthetic_acceptance_rate.",
         '{{"num_speculative_tokens": {length}, "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [{survival}]}}'),
    Form("llama.cpp", "llama-cpp-python 0.3.36 (0c1e570)", "llama-cpp.txt", "Options beside --spec-type and the drafter. Survival, "
         "without the target's own token; each slot draws guess by guess, to the first miss, and never accepts an end of the text.",
         DRAFT + " --spec-synth-rates {survival}"),
    Form("SGLang", "0.5.23", "sglang.txt", "Variables, with --speculative-num-draft-tokens of the length + 1. The mean, with the "
         "target's own token; all requests of a step draw one number, the mean rounded down or up, so they vary less than real ones.",
         "SGLANG_SIMULATE_ACC_LEN={tokens} SGLANG_SIMULATE_ACC_METHOD=match-expected SGLANG_SIMULATE_ACC_TOKEN_MODE=real-draft-token"),
    Form("TensorRT-LLM", "its source of 2026", "tensorrt-llm.txt", "A variable, with max_draft_len of the length. The mean, without the target's "
         "own token; each request accepts the whole part, and one more by chance. Older builds take whole numbers alone.",
         "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS={accepted}"),
    Form("AIConfigurator", "0.11.0 (095f58a)", "aiconfigurator.txt", "Options. The mean, without the target's own token. Its older "
         "YAML has nextn_accept_rates instead: the conditional rates of dynamo.txt.", "--nextn {length} --nextn-accepted {accepted}"),
    Form("Dynamo's mocker", "its source of 2026", "dynamo.txt", "Options, in newer builds --ais-nextn and --ais-nextn-accept-rates. Conditional "
         "rates: each guess where those before it were accepted; each request draws guess by guess.",
         "--aic-nextn {length} --aic-nextn-accept-rates {conditional}", most=5),
    Form("InferenceX", "fb9a9ca", "inferencex.yaml", "Rows of golden_al_distribution/*.yaml. The mean, with the target's own token, "
         "by length. Put the model's key for the name, and thinking_on where it thinks.",
         "    {length}: {tokens:.2f}", heading="{name}:\n  thinking_off:"),
)  # fmt: skip


def numbers_of(survival: Sequence[float]) -> dict[str, float | str]:
    """Name to number of a chain, for the lines of `Form`; lists are joined by commas.

    >>> numbers_of([0.816, 0.634, 0.0, 0.0])["conditional"]
    '0.816,0.777,0.0,0.0'
    """
    accepted, pairs = round(sum(survival), DIGITS), pairwise([1.0, *survival])
    conditional = [round(share / before, DIGITS) if before else 0.0 for before, share in pairs]
    return {
        "length": len(survival),
        "accepted": accepted,
        "tokens": round(1 + accepted, DIGITS),
        "survival": ",".join(map(str, survival)),
        "conditional": ",".join(map(str, conditional)),
    }


def write(groups: Mapping[str, Survivals], about: str) -> dict[str, str]:
    """Name to text of a file for each tool.

    groups : group of prompts to the survival of its chains of 1, 2, ... guesses
    about  : the drafter and the rule, in words
    """
    rounded: dict[str, list[list[float]]] = {}
    for name, chains in groups.items():
        rounded[name] = [[round(share, DIGITS) for share in chain] for chain in chains]
    files = {}
    for form in FORMS:
        lines = [f"# For {form.title}, checked against {form.checked}. Written by treeopt {__version__}."]
        lines += [f"# {line}" for line in (about, form.meaning)]
        for name, chains in rounded.items():
            lines.append(form.heading.format(name=json.dumps(name)))
            for numbers in map(numbers_of, chains[: form.most]):
                lines += ["# {length}: {tokens} tokens per step".format(**numbers), form.line.format(**numbers)]
        files[form.file] = "\n".join(lines) + "\n"
    return files
