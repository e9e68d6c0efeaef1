"""LMDeploy: the length of a chain as a flag, with its PyTorch backend alone."""

from treeopt.engines.base import Method, ServingEngine
from treeopt.engines.templates import Templates

ALGORITHM = "--speculative-algorithm {name}{drafter} --speculative-num-draft-tokens {{length}}"
DRAFTER = " --speculative-draft-model DRAFTER"
write = Templates(
    command="lmdeploy serve api_server MODEL --backend pytorch",
    options={
        "eagle3": ALGORITHM.format(name="eagle3", drafter=DRAFTER),
        "eagle": ALGORITHM.format(name="eagle", drafter=DRAFTER),
        "mtp": ALGORITHM.format(name="deepseek_mtp", drafter=""),
        "dflash": ALGORITHM.format(name="dflash", drafter=DRAFTER),
    },
    notes=("Without --backend pytorch it may take TurboMind, which only warns and does not speculate.",),
    notes_of={
        "mtp": (
            "DeepSeek's own layer is deepseek_mtp; hy3_mtp and qwen3_5_mtp are other models'. The layer is read from "
            "MODEL unless --speculative-draft-model names another folder.",
        )
    },
)

ENGINE = ServingEngine(name="lmdeploy", title="LMDeploy", package="lmdeploy", server="lmdeploy serve", methods=(
    Method(name="number", checked="0.18.0", drafters=tuple(write.options), rules=("greedy", "sample"),
           carrier="--speculative-num-draft-tokens",
           versions="current, PyTorch backend only",
           source="InternLM/lmdeploy lmdeploy/messages.py, lmdeploy/cli/utils.py, lmdeploy/pytorch/spec_decode/spec_agent.py",
           write=write),
))  # fmt: skip
