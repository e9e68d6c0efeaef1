"""Checkpoints of training: a run that was stopped goes on where it was, and ends in the same weights.

A checkpoint is two files, named by the step: weights (safetensors, only what is trained) and the optimiser's
state (torch, loadable without pickles). ``state.json`` names the step whose files are whole; it is written
last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from treeopt.errors import InvalidInput
from treeopt.files import storage, writing
from treeopt.files.journal import Journal
from treeopt.runtime.checkpoints.save import write_tensors
from treeopt.runtime.folder import reason_of

STATE = "state.json"
DIGESTS = ("texts", "weights")  # keys whose values say nothing to a reader


@dataclass(frozen=True)
class Position:
    """Where a run is: steps done, and seconds of training that they took."""

    step: int = 0
    seconds: float = 0.0


class Checkpoints:
    """The checkpoints of one run, under a folder of their own.

    key : all that the weights depend on, as plain JSON
    """

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        self.folder, self.key = folder, key

    def check(self) -> None:
        """Raise InvalidInput where the folder has a checkpoint of another run."""
        if not (self.folder / STATE).exists():
            return
        known, wanted = storage.load_json(self.folder / "key.json"), json.loads(storage.to_json(self.key))
        known = known if isinstance(known, dict) else {}
        other = [name for name in wanted if known.get(name) != wanted[name]]
        if other:
            said = [
                name.removeprefix("num_").replace("_", " ")
                + ("" if name in DIGESTS else f" ({known.get(name)}, not {wanted[name]})")
                for name in other
            ]
            raise InvalidInput(
                f"{self.folder} holds a half-trained run that differs in {', '.join(said)}: continue it with its own "
                "command, pass another --output, or delete that folder."
            )

    def open(self) -> None:
        """Begin, or keep what there is of this run."""
        self.check()
        Journal(self.folder, self.key)

    def position(self) -> Position:
        """Where the last checkpoint is; the beginning where there is none."""
        file = self.folder / STATE
        return storage.typed(Position, storage.load_json(file), file) if file.exists() else Position()

    def save(self, position: Position, module: nn.Module, optimiser: Any, scaler: Any = None) -> None:
        name = f"{position.step:08d}"
        write_tensors(self.folder / f"{name}.safetensors", weights(module))
        state = {"optimiser": optimiser.state_dict(), "scaler": None if scaler is None else scaler.state_dict()}
        with writing.atomic_writer(self.folder / f"{name}.optimiser") as stream:
            torch.save(state, stream)
        writing.write_text(self.folder / STATE, storage.to_json(vars(position)) + "\n")
        for file in self.folder.iterdir():
            if file.suffix in (".safetensors", ".optimiser") and not file.name.startswith(name):
                file.unlink()

    def load(self, module: nn.Module, optimiser: Any, scaler: Any = None) -> Position:
        """Put the last checkpoint into module and optimiser; the beginning where there is none."""
        from safetensors.torch import load_file

        position = self.position()
        if not position.step:
            return position
        name = f"{position.step:08d}"
        try:
            stored = load_file(self.folder / f"{name}.safetensors")
            state = torch.load(self.folder / f"{name}.optimiser", weights_only=True, map_location="cpu")
            missing, strange = module.load_state_dict(stored, strict=False)
            if strange or set(missing) & weights(module).keys():
                raise ValueError(f"{name}.safetensors must have all that is trained, and nothing else")
            optimiser.load_state_dict(state["optimiser"])
            if scaler is not None:
                scaler.load_state_dict(state["scaler"])
        except Exception as error:  # safetensors and torch raise anything at damaged files
            raise InvalidInput(
                f"{self.folder} cannot be continued: {reason_of(error)}. Delete it to begin anew."
            ) from None
        return position


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """The weights of a module that are trained, on the CPU."""
    return {name: p.detach().cpu().contiguous() for name, p in module.named_parameters() if p.requires_grad}
