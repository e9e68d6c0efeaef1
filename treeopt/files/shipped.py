"""What is known beforehand: shipped calibrations and profiles, checkpoint layouts."""

from __future__ import annotations

from pathlib import Path

from treeopt.errors import InvalidInput

# Layouts of heads that treeopt reads and writes, by the names that `treeopt convert` takes.
LAYOUTS = {
    "medusa": "medusa_lm_head.safetensors, a projection per head: Medusa v0.1, TGI",
    "medusa-pt": "the same tensors in medusa_lm_head.pt: Medusa v0.1, TensorRT-LLM's converter",
    "medusa-shared": "medusa_lm_head.safetensors, residual blocks only, on the base's lm_head: Medusa, TGI",
    "merged": "one model with the heads under medusa_head.: Medusa-2",
    "modelopt": "one model with the heads under medusa_heads.: NVIDIA Model Optimizer",
    "vllm": "model.safetensors with blocks and lm_heads, or a truncated vocabulary: vLLM up to 0.32.0",
    "tensorrt-llm": "rank0.safetensors, the heads' part of a TensorRT-LLM checkpoint",
    "neuron": "medusa_heads.pt, to lie beside the base's files: AWS Neuron",
    "hydra": "the tensors of hydra-pt in hydra_lm_head.safetensors",
    "hydra-pt": "hydra_lm_head.pt, heads that read the guesses before them: Hydra",
    "hydra++": "the tensors of hydra++-pt in hydra_lm_head.safetensors",
    "hydra++-pt": "hydra_lm_head.pt with a prefix layer: Hydra++",
    "eagle-1": "model.safetensors with fc and one layer: EAGLE-1 and EAGLE-2",
    "eagle-3": "model.safetensors with fc, midlayer and a vocabulary of its own: EAGLE-3, SGLang, vLLM",
}


def shipped_folder(kind: str) -> Path:
    """Where shipped files of a kind ("calibration", "profiles") lie: in the wheel, or in a checkout."""
    package = Path(__file__).parents[1]
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
