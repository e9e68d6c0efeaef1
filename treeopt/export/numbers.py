"""Engines that take a number or two on their command line, and no file.

LMDeploy, RTP-LLM   the length of a chain
llama.cpp           the longest chain; it stops earlier where its drafter is unsure
ReDrafter           width and length of a beam, whose first token is the target's own
"""

from __future__ import annotations

from treeopt.export.chains import drafter_of, only_length
from treeopt.export.engine import Request, Written

LMDEPLOY = {"eagle3": "eagle3", "eagle": "eagle", "mtp": "deepseek_mtp"}
LLAMA_CPP = ("draft-model", "eagle3", "mtp")
RTP_LLM = {"mtp": "mtp", "eagle3": "eagle3", "draft-model": "vanilla"}


def lmdeploy(request: Request) -> Written:
    """``--speculative-num-draft-tokens``."""
    drafter = drafter_of(request, LMDEPLOY, "LMDeploy")
    notes = ("DeepSeek's own layer is deepseek_mtp; hy3_mtp and qwen3_5_mtp are other models'.",)
    return _command(
        request,
        "LMDeploy",
        "lmdeploy serve api_server MODEL",
        f"--speculative-algorithm {LMDEPLOY[drafter]} --speculative-draft-model DRAFTER "
        "--speculative-num-draft-tokens {length}",
        notes if drafter == "mtp" else (),
    )


def llama_cpp(request: Request) -> Written:
    """``--draft-max``; it takes no tree from outside, and llama-server makes none."""
    drafter_of(request, LLAMA_CPP, "llama.cpp")
    notes = (
        "--draft-p-min 0 lets llama.cpp draft to the end, as the plan counts; with more it stops where its "
        "drafter is unsure.",
        "Newer builds call the options --spec-draft-n-max and --spec-draft-p-min.",
    )
    return _command(
        request,
        "llama.cpp",
        "llama-server --model MODEL.gguf",
        "--model-draft DRAFTER.gguf --draft-max {length} --draft-min 0 --draft-p-min 0",
        notes,
    )


def redrafter(request: Request) -> Written:
    """``--beam_width`` and ``--beam_length``: of one beam, which is a chain."""
    drafter_of(request, ("redrafter",), "ReDrafter")
    notes = ("ReDrafter makes its tree of beams at run time; one beam is the chain of the plan.",)
    return _command(request, "ReDrafter", "", "--beam_width 1 --beam_length {rows}", notes)


def rtp_llm(request: Request) -> Written:
    """``--gen_num_per_cycle``; RTP-LLM's ``--tree_decode_config`` constrains the output and is no such tree."""
    drafter = drafter_of(request, RTP_LLM, "RTP-LLM")
    return _command(
        request,
        "RTP-LLM",
        "python -m rtp_llm.start_server --checkpoint_path MODEL",
        f"--sp_type {RTP_LLM[drafter]} --sp_checkpoint_path DRAFTER --gen_num_per_cycle {{length}}",
    )


def _command(request: Request, engine: str, serve: str, options: str, notes: tuple[str, ...] = ()) -> Written:
    """``serve`` with the options for the one length, or alone where no chain pays."""
    length = only_length(request, engine)
    if length == 0:
        return Written(files={}, command=serve, notes=("No chain pays here: serve the base model.",))
    command = f"{serve} {options.format(length=length, rows=length + 1)}".strip()
    return Written(files={}, command=command, notes=notes)
