"""What a command works with: a target, its drafter, a rule and prompts, loaded and checked against each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from treeopt import demo
from treeopt.errors import InvalidInput
from treeopt.files.provenance import Provenance
from treeopt.runtime.acceptance.greedy import Acceptance, Greedy
from treeopt.runtime.acceptance.open import by_rejection, open_acceptance
from treeopt.runtime.decode import StopRule
from treeopt.runtime.drafters.open import open_drafter
from treeopt.runtime.drafters.protocol import Drafter
from treeopt.runtime.prompts.sets import PromptSet, demo_prompts, load_prompts
from treeopt.runtime.target import Target, load_target


@dataclass(frozen=True)
class Session:
    """A loaded target with its drafter and prompts."""

    target: Target
    drafter: Drafter
    drafter_record: dict[str, Any]  # kind, id, layout, sha256, num_heads
    prompts: PromptSet
    given: bool = False  # whether the prompts come with answers
    notes: tuple[str, ...] = ()  # what loading repaired, left out, or found strange
    weights: str = "checkpoint"  # or "random weights"
    acceptance: Acceptance = field(default_factory=Greedy)
    temperature: float | None = None  # at which given answers were sampled

    def stop(self, max_new_tokens: int) -> StopRule:
        return StopRule(self.target.eos_ids, max_new_tokens)

    def provenance(self, seed: int | None = None) -> Provenance:
        target = self.target
        return Provenance(
            model=target.name,
            revision=target.revision,
            drafter=self.drafter_record,
            dataset=self.prompts.name,
            dataset_fingerprint=self.prompts.fingerprint,
            acceptance=self.acceptance.record,
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
    prompts: str | None = None,
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
    draft_depth: int | None = None,
    acceptance: str | None = None,
    temperature: float | None = None,
    **rule: Any,
) -> Session:
    """Load everything and raise InvalidInput where the parts do not belong together.

    prompts : see `load_prompts`; "demo", the default with the demo model, are pieces of the Python standard library
    drafter, draft_depth : see `open_drafter`
    acceptance, temperature, rule : see `open_acceptance`; with ``responses`` the temperature is that of the answers
    """
    is_demo = model == demo.NAME
    rules = open_acceptance(acceptance, temperature, given=responses is not None, **rule)
    if not is_demo and prompts is None:
        raise InvalidInput(
            "--prompts is needed with a model of your own, since a tree is only as good as the prompts it "
            "was measured on: pass a file (.jsonl, .json, .csv, .parquet, .txt) or a datasets id."
        )
    prompts = prompts or demo.NAME
    if prompts == demo.NAME and (column or responses or split):
        raise InvalidInput("--column, --responses and --split need --prompts: the demo's are plain text.")
    target = load_target(
        str(demo.MODEL) if is_demo else model,
        dtype=dtype,
        device=device,
        device_map=device_map,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    opened = open_drafter(
        drafter, target, is_demo=is_demo, depth=draft_depth, revision=revision, trust_remote_code=trust_remote_code
    )
    drafting: Drafter = opened.drafter
    if acceptance == "reject":
        drafting, rules = by_rejection(drafting, target, rules)
    if is_demo:
        target.name = "treeopt demo model"
    if prompts == demo.NAME:
        chosen = demo_prompts(target, group_by=group_by)
    else:
        chosen = load_prompts(
            target,
            prompts,
            column=column,
            group_by=group_by,
            responses=responses,
            chat_template=chat_template,
            split=split,
        )
    notes = list(opened.notes)
    if chosen.skipped:
        first = chosen.skipped[0]
        notes.append(
            f"{len(chosen.skipped)} of {len(chosen.skipped) + len(chosen.conversations)} prompts left "
            f"out, the first at row {first.row}: {first.reason}. calibration.json lists all."
        )
    return Session(
        target,
        drafting,
        opened.record,
        chosen,
        responses is not None,
        tuple(notes),
        acceptance=rules,
        temperature=temperature if responses is not None else None,
    )
