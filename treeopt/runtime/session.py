"""What a command works with: a target, its heads and prompts, loaded and checked against each other."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from treeopt import demo
from treeopt.errors import InvalidInput, Unsupported
from treeopt.provenance import Provenance
from treeopt.runtime.checkpoints import load_heads
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
    drafter: dict[str, Any]  # kind, id, layout, sha256, num_heads
    prompts: PromptSet
    given: bool = False  # whether the prompts come with answers
    notes: tuple[str, ...] = ()  # what loading repaired, left out, or found strange
    weights: str = "checkpoint"  # or "random weights"

    def stop(self, max_new_tokens: int) -> StopRule:
        return StopRule(self.target.eos_ids, max_new_tokens)

    def acceptance(self, temperature: float | None) -> dict[str, Any]:
        """The rule that a trace of the session's answers holds for.

        Answers that the target itself sampled are exact for sample-then-match at that temperature; any
        others are read as if decoding were greedy.
        """
        return {"rule": "sample-then-match", "temperature": temperature} if temperature else GREEDY

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
        from treeopt.runtime.compiled import uses_cuda_graphs

        return {
            "name": "treeopt",
            "version": __version__,
            "attention": self.target.config._attn_implementation,
            "compiled": self.target.compiled,
            "cuda_graphs": uses_cuda_graphs(self.target),
            **({} if self.weights == "checkpoint" else {"weights": self.weights}),
        }


def open_session(
    model: str = demo.NAME,
    drafter: str | None = None,
    prompts: str = demo.NAME,
    *,
    dtype: str | None = None,
    device: str | None = None,
    device_map: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    column: str | None = None,
    group_by: str | None = None,
    responses: str | None = None,
    split: str | None = None,
    chat_template: bool = True,
) -> Session:
    """Load everything and raise InvalidInput where the parts do not belong together.

    Without ``drafter`` the heads are those that the model's own checkpoint holds (Medusa-2).
    """
    is_demo = model == demo.NAME
    if is_demo and drafter not in (None, demo.NAME):
        raise InvalidInput(
            "--model and --drafter go together: heads fit only the model they were trained for, but "
            f"got --drafter {drafter} without --model."
        )
    if not is_demo and prompts == demo.NAME:
        raise InvalidInput(
            "--prompts is needed with a model of your own, since a tree is only as good as the prompts it "
            "was measured on: pass a file (.jsonl, .json, .csv, .parquet, .txt) or a datasets id."
        )
    if prompts == demo.NAME and (column or responses or split):
        raise InvalidInput("--column, --responses and --split need --prompts: the demo's are plain text.")
    target = load_target(str(demo.MODEL) if is_demo else model, dtype=dtype, device=device,
                         device_map=device_map, revision=revision, trust_remote_code=trust_remote_code)  # fmt: skip
    where = str(demo.HEADS) if is_demo else drafter or model
    loaded = load_heads(where, lm_head=target.lm_head.weight, dtype=target.dtype, device=target.device,
                        revision=revision if where == model else None)  # fmt: skip
    heads = loaded.heads
    if heads.shares_projection and target.lm_head.bias is not None:
        raise Unsupported("Heads that share the lm_head need one without a bias, but this model's has one.")
    if heads.width != target.width or heads.vocab_size != target.vocab_size:
        raise InvalidInput(
            f"The heads must fit the model (width {target.width}, vocabulary {target.vocab_size}), but "
            f"{where} has width {heads.width} and vocabulary {heads.vocab_size}."
        )
    if is_demo:
        target.name = "treeopt demo model"
    digest = hashlib.sha256("".join(map(sha256_of, loaded.files)).encode()).hexdigest()
    record = {"kind": heads.kind, "id": "treeopt demo heads" if is_demo else where, "layout": loaded.layout,
              "sha256": digest, "num_heads": heads.num_heads,
              "num_layers": heads.num_layers}  # fmt: skip
    if prompts == demo.NAME:
        chosen = demo_prompts(target, group_by=group_by)
    else:
        chosen = load_prompts(target, prompts, column=column, group_by=group_by, responses=responses,
                              chat_template=chat_template, split=split)  # fmt: skip
    notes = list(loaded.notes)
    if chosen.skipped:
        first = chosen.skipped[0]
        notes.append(
            f"{len(chosen.skipped)} of {len(chosen.skipped) + len(chosen.conversations)} prompts left "
            f"out, the first at row {first.row}: {first.reason}. calibration.json lists all."
        )
    return Session(target, heads, record, chosen, responses is not None, tuple(notes))
