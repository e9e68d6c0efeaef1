"""Engines that take a number or two on their command line, and no file.

LMDeploy, RTP-LLM   the length of a chain; RTP-LLM's --tree_decode_config constrains the output and is no tree
llama.cpp           the longest chain; it stops earlier where its drafter is unsure, and takes no tree from outside
ReDrafter           width and length of a beam, whose first token is the target's own
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from treeopt.export.chains import drafter_of, only_length
from treeopt.export.engine import Request, Written


@dataclass(frozen=True)
class Options:
    """A command for serving, alone where no chain pays, and the options that it takes for a chain.

    drafters : kind of drafter to the engine's own name, which stands for {drafter} in the options; {length} is the
               chain's, {rows} one more
    """

    engine: str
    drafters: Mapping[str, str]
    serve: str
    options: str
    notes: tuple[str, ...] = ()
    of_mtp: tuple[str, ...] = ()  # notes on a drafter of the kind mtp alone

    def __call__(self, request: Request) -> Written:
        kind = drafter_of(request, self.drafters, self.engine)
        length = only_length(request, self.engine)
        if length == 0:
            return Written(files={}, command=self.serve, notes=("No chain pays here: serve the base model.",))
        command = (
            f"{self.serve} {self.options.format(drafter=self.drafters[kind], length=length, rows=length + 1)}".strip()
        )
        return Written(files={}, command=command, notes=self.notes + self.of_mtp * (kind == "mtp"))


lmdeploy, llama_cpp, redrafter, rtp_llm = (
    Options("LMDeploy", {"eagle3": "eagle3", "eagle": "eagle", "mtp": "deepseek_mtp"}, "lmdeploy serve api_server MODEL",
            "--speculative-algorithm {drafter} --speculative-draft-model DRAFTER --speculative-num-draft-tokens {length}",
            of_mtp=("DeepSeek's own layer is deepseek_mtp; hy3_mtp and qwen3_5_mtp are other models'.",)),
    Options("llama.cpp", dict.fromkeys(("draft-model", "eagle3", "mtp"), ""), "llama-server --model MODEL.gguf",
            "--model-draft DRAFTER.gguf --draft-max {length} --draft-min 0 --draft-p-min 0",
            ("--draft-p-min 0 lets llama.cpp draft to the end, as the plan counts; with more it stops where its drafter "
             "is unsure.", "Newer builds call the options --spec-draft-n-max and --spec-draft-p-min.")),
    Options("ReDrafter", {"redrafter": ""}, "", "--beam_width 1 --beam_length {rows}",
            ("ReDrafter makes its tree of beams at run time; one beam is the chain of the plan.",)),
    Options("RTP-LLM", {"mtp": "mtp", "eagle3": "eagle3", "draft-model": "vanilla"},
            "python -m rtp_llm.start_server --checkpoint_path MODEL",
            "--sp_type {drafter} --sp_checkpoint_path DRAFTER --gen_num_per_cycle {length}"),
)  # fmt: skip
