"""What a command works with: a target, its heads and prompts, loaded and checked against each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeopt import demo
from treeopt.errors import InvalidInput
from treeopt.provenance import Provenance
from treeopt.runtime.checkpoints import find_heads, load_medusa
from treeopt.runtime.decode import StopRule
from treeopt.runtime.drafters.medusa import MedusaHeads
from treeopt.runtime.prompts import PromptSet, demo_prompts, load_prompts
from treeopt.runtime.target import Target, load_target
from treeopt.storage import sha256_of

GREEDY = {"rule": "greedy", "temperature": 0.0}


@dataclass(frozen=True)
class Session:
    """A loaded target with its drafter and prompts."""

    target: Target
    heads: MedusaHeads
    drafter: dict[str, Any]  # kind, id, sha256, num_heads
    prompts: PromptSet

    def stop(self, max_new_tokens: int) -> StopRule:
        return StopRule(self.target.eos_ids, max_new_tokens)

    def provenance(self, seed: int | None = None) -> Provenance:
        target = self.target
        return Provenance(
            model=target.name,
            revision=target.revision,
            drafter=self.drafter,
            dataset=self.prompts.name,
            dataset_fingerprint=self.prompts.fingerprint,
            acceptance=GREEDY,
            device=str(target.device),
            dtype=str(target.dtype).removeprefix("torch."),
            seed=seed,
        )

    def runtime(self) -> dict[str, Any]:
        """Whose latencies a profile holds."""
        from treeopt import __version__

        return {
            "name": "treeopt",
            "version": __version__,
            "attention": self.target.config._attn_implementation,
            "compiled": False,
            "cuda_graphs": False,
        }


def open_session(
    model: str = demo.NAME,
    drafter: str = demo.NAME,
    prompts: str = demo.NAME,
    *,
    dtype: str | None = None,
    device: str = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Session:
    """Load everything and raise InvalidInput where the parts do not belong together."""
    if (model == demo.NAME) != (drafter == demo.NAME):
        raise InvalidInput(
            "--model and --drafter go together: heads fit only the model they were trained for, but "
            f"got --model {model} and --drafter {drafter}."
        )
    if model != demo.NAME and prompts == demo.NAME:
        raise InvalidInput(
            "--prompts is needed with a model of your own, since a tree is only as good as the prompts it "
            "was measured on: pass a .jsonl or .txt file."
        )
    is_demo = model == demo.NAME
    target = load_target(str(demo.MODEL) if is_demo else model, dtype=dtype, device=device,
                         revision=revision, trust_remote_code=trust_remote_code)  # fmt: skip
    folder = demo.HEADS if is_demo else Path(drafter)
    heads = load_medusa(folder, dtype=target.dtype).to(target.device)
    if heads.width != target.width or heads.vocab_size != target.vocab_size:
        raise InvalidInput(
            f"The heads must fit the model (width {target.width}, vocabulary {target.vocab_size}), but "
            f"{folder} has width {heads.width} and vocabulary {heads.vocab_size}."
        )
    if is_demo:
        target.name = "treeopt demo model"
    record = {"kind": heads.kind, "id": "treeopt demo heads" if is_demo else str(drafter),
              "sha256": sha256_of(find_heads(folder)), "num_heads": heads.num_heads}  # fmt: skip
    chosen = demo_prompts(target) if prompts == demo.NAME else load_prompts(target, Path(prompts))
    return Session(target, heads, record, chosen)
