"""What is known beforehand: shipped calibrations and profiles, the published tree, checkpoint layouts."""

from __future__ import annotations

from pathlib import Path

from treeopt.errors import InvalidInput
from treeopt.tree import Tree

# FasterDecoding/Medusa, medusa/model/medusa_choices.py (commit e2a5d20), in the order of insertion;
# a word is a path of ranks. Hydra, TensorRT-LLM's README and others reuse it for every model.
MC_SIM_7B_63 = (
    "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 "
    "003 40 21 004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 "
    "101 021 90 060 0001 16 070"
)

# Layouts of Medusa heads that treeopt reads and writes, by the names that `treeopt convert` takes.
LAYOUTS = {
    "medusa": "medusa_lm_head.safetensors, a projection per head: Medusa v0.1, TGI",
    "medusa-pt": "the same tensors in medusa_lm_head.pt: Medusa v0.1, TensorRT-LLM's converter",
    "medusa-shared": "medusa_lm_head.safetensors, residual blocks only, on the base's lm_head: Medusa, TGI",
    "merged": "one model with the heads under medusa_head.: Medusa-2",
    "modelopt": "one model with the heads under medusa_heads.: NVIDIA Model Optimizer",
    "vllm": "model.safetensors with blocks and lm_heads, or a truncated vocabulary: vLLM",
    "tensorrt-llm": "rank0.safetensors, the heads' part of a TensorRT-LLM checkpoint",
    "neuron": "medusa_heads.pt, to lie beside the base's files: AWS Neuron",
}


def published_tree() -> Tree:
    """The default of the Medusa authors, `mc_sim_7b_63`: 63 choices, 64 rows with the root.

    >>> published_tree().widths()
    [10, 28, 23, 2]
    """
    return Tree.from_choices([[int(rank) for rank in word] for word in MC_SIM_7B_63.split()])


def shipped_folder(kind: str) -> Path:
    """Where shipped files of a kind ("calibration", "profiles") lie: in the wheel, or in a checkout."""
    package = Path(__file__).parent
    installed = package / "shipped" / kind
    return installed if installed.is_dir() else package.parent / kind


def shipped(kind: str) -> dict[str, Path]:
    """Name to file of everything of a kind that ships with the package."""
    return {path.stem: path for path in sorted(shipped_folder(kind).glob("*.json"))}


def find(kind: str, path_or_name: str) -> Path:
    """A file given by path, or a shipped one by its name; InvalidInput if there is neither."""
    path = Path(path_or_name)
    if path.exists():
        return path
    known = shipped(kind)
    if path_or_name not in known:
        names = ", ".join(known) or "none"
        raise InvalidInput(f"There is no file {path_or_name}, nor a shipped one of that name ({names}).")
    return known[path_or_name]
