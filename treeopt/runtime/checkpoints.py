"""Read and write published head checkpoints. Counts come from the tensors, never from the config.

Medusa's layout: a folder with ``config.json`` and ``medusa_lm_head.safetensors`` or ``.pt``, whose
tensors are ``{k}.{l}.linear.weight`` [d, d], ``{k}.{l}.linear.bias`` [d] for l < L and
``{k}.{L}.weight`` [V, d].
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from torch import Tensor

from treeopt.errors import InvalidInput
from treeopt.runtime.drafters.medusa import MedusaHeads

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_NAME = re.compile(r"(\d+)\.(\d+)\.(?:linear\.)?(?:weight|bias)")


def find_heads(path: Path) -> Path:
    """The file of weights: ``path`` itself, or the one in the folder ``path``."""
    if path.is_file():
        return path
    for name in FILES:
        if (path / name).is_file():
            return path / name
    raise InvalidInput(
        f"--drafter must be a folder with {' or '.join(FILES)}, or such a file, "
        f"but {path} {'has neither' if path.is_dir() else 'does not exist'}."
    )


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file or a weights-only pickle, by name; nothing is executed."""
    import pickle

    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        tensors = torch.load(file, weights_only=True, map_location="cpu")
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError, LookupError):
        raise InvalidInput(
            f"{file} must be safetensors or a pickled state dict of tensors, but it is not readable as one: "
            "it may be cut off, a Git LFS pointer, or hold code. Download it again."
        ) from None
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
    ):
        raise InvalidInput(f"{file} must hold a state dict of tensors, but it holds something else.")
    return tensors


def load_medusa(path: str | Path, *, dtype: torch.dtype = torch.float32) -> MedusaHeads:
    """The Medusa heads stored at ``path`` (a folder or a file), on the CPU.

    Raises InvalidInput for a file that is truncated, has names that are not Medusa's, misses a
    tensor of a head, or has tensors of shapes that do not fit together.
    """
    file = find_heads(Path(path))
    tensors = read_tensors(file)
    matches = {name: _NAME.fullmatch(name) for name in tensors}
    strange = [name for name, match in matches.items() if match is None]
    if strange or not tensors:
        raise InvalidInput(
            f"{file} must hold Medusa heads ({{head}}.{{layer}}.linear.weight ...), but it has "
            f"{', '.join(sorted(strange)[:3]) or 'no tensors'}."
        )
    num_heads = 1 + max(int(m[1]) for m in matches.values() if m)
    num_layers = max(int(m[2]) for m in matches.values() if m)
    projection = tensors.get(f"0.{num_layers}.weight")
    if projection is None or projection.ndim != 2:
        raise InvalidInput(
            f"{file} must hold each head's own vocabulary projection (0.{num_layers}.weight), but it "
            "has none: heads that share the target's lm_head are not supported yet."
        )
    heads = MedusaHeads(num_heads, num_layers, projection.shape[1], projection.shape[0])
    places = heads.named_tensors()
    want = {name: tuple(t.shape) for name, t in places.items()}
    have = {name: tuple(t.shape) for name, t in tensors.items()}
    if want != have:
        wrong = sorted(n for n in want.keys() | have.keys() if want.get(n) != have.get(n))
        shapes = f"shape {have.get(wrong[0])} where {want.get(wrong[0])} is expected"
        raise InvalidInput(
            f"{file} holds {num_heads} heads of {num_layers} blocks, but tensor {wrong[0]} has {shapes}."
        )
    with torch.no_grad():
        for name, place in places.items():
            place.copy_(tensors[name])
    return heads.to(dtype).eval().requires_grad_(False)


def save_medusa(heads: MedusaHeads, folder: Path, *, base: str) -> None:
    """Write ``heads`` in Medusa's own layout (safetensors) to ``folder``."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.contiguous().cpu() for name, t in heads.named_tensors().items()}
    save_file(tensors, folder / FILES[0], metadata={"format": "pt"})
    config = {
        "medusa_num_heads": heads.num_heads,
        "medusa_num_layers": heads.num_layers,
        "base_model_name_or_path": base,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
