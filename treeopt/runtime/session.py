"""A session: a target, its drafter, a rule and prompts, loaded and checked against each other."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from treeopt import __version__, demo
from treeopt.errors import InvalidInput
from treeopt.records.display import one_line
from treeopt.records.options import Source
from treeopt.records.origins import DrafterRecord, Provenance, Runtime
from treeopt.runtime.acceptance.rejection import Rejection, SampledChain
from treeopt.runtime.acceptance.rules import Greedy, Sampling, Typical
from treeopt.runtime.cluster import Cluster
from treeopt.runtime.drafters.draft_model import DraftModel
from treeopt.runtime.drafters.open import open_drafter
from treeopt.runtime.drafters.protocol import Drafter
from treeopt.runtime.prompts.order import order_of
from treeopt.runtime.prompts.sets import PromptSet, demo_prompts, load_prompts
from treeopt.runtime.setup import Setup
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import Target, device_name, load_target


@dataclass(frozen=True, repr=False)
class Session:
    """A loaded target with its drafter and prompts."""

    target: Target
    drafter: Drafter
    drafter_record: DrafterRecord
    prompts: PromptSet
    given: bool = False  # whether the answers that the prompts come with are read
    notes: tuple[str, ...] = ()  # what loading repaired, left out, or found strange
    weights: str = "checkpoint"  # or "random weights"
    acceptance: Greedy = field(default_factory=Greedy)
    source: Source = field(default_factory=Source)  # options that it was opened with; a trace keeps them
    cluster: Cluster | None = None  # whose workers hold it, where this is an outline
    known: Provenance | None = None  # of an outline: where its figures come from, as the worker tells it
    # Of answers of a log, by prompt; as a server's they go on in loops.
    limits: Mapping[tuple[int, ...], int] | None = None

    __repr__ = one_line

    @property
    def temperature(self) -> float | None:
        """The temperature at which given answers were sampled, 0 for greedy; None where that is not known."""
        is_known = self.given and self.source.rule is not None
        return self.acceptance.record.get("temperature", 0.0) if is_known else None

    def setup(self, max_new_tokens: int) -> Setup:
        """The parts that decode the session's answers, each of at most so many tokens."""
        stop = StopRule(self.target.eos_ids, max_new_tokens, at_loops=self.limits is None, limits=self.limits or {})
        return Setup(self.target, self.drafter, stop, self.acceptance)

    def provenance(self, seed: int | None = None) -> Provenance:
        if self.known is not None:
            now = Provenance.here()
            return replace(self.known, seed=seed, command=now.command, time=now.time)
        target = self.target
        return replace(
            Provenance.here(),
            model=target.name,
            revision=target.revision,
            drafter=self.drafter_record,
            dataset=self.prompts.name,
            dataset_fingerprint=self.prompts.fingerprint,
            acceptance=self.acceptance.record,
            device=device_name(target.device),
            dtype=str(target.dtype).removeprefix("torch."),
            seed=seed,
            threads=torch.get_num_threads() if target.device.type == "cpu" else None,
        )

    def runtime(self) -> Runtime:
        known: Runtime = {
            "name": "treeopt",
            "version": __version__,
            "attention": self.target.config._attn_implementation,
        }
        if self.weights != "checkpoint":
            known["weights"] = self.weights
        return known


def open_session(source: Source | None = None, prompts: PromptSet | None = None) -> Session:
    """Load everything and raise InvalidInput where the parts do not belong together.

    prompts : those of the source, where they have been read already
    """
    source = source or Source()
    rule, _ = open_rule(source), prompts_name(source)  # refused before anything is loaded
    target = open_model(source)
    opened = open_drafter(
        source.drafter,
        target,
        depth=source.draft_depth,
        revision=source.revision,
        trust_remote_code=source.trust_remote_code,
    )
    drafter: Drafter = opened.drafter
    if source.acceptance.name == "reject":
        drafter, rule = by_rejection(drafter, target, rule)
    prompts = prompts or open_prompts(source, target)
    return Session(
        target,
        drafter,
        opened.record,
        prompts,
        given=source.responses is not None,
        notes=(*opened.notes, *_skipped_note(prompts)),
        acceptance=rule,
        source=source,
    )


def open_model(source: Source) -> Target:
    return load_target(
        source.model or demo.NAME,
        dtype=source.dtype,
        device=source.device,
        device_map=source.device_map,
        revision=source.revision,
        trust_remote_code=source.trust_remote_code,
    )


def open_rule(source: Source) -> Greedy:
    """The acceptance rule that a session's options ask for.

    Rejection needs the draft model too: here it is sampling, and `by_rejection` makes the two of them.

    >>> open_rule(Source(rule="typical:temperature=0.5")).record["temperature"]
    0.5
    """
    rule = source.acceptance
    if rule.name == "greedy":
        return Greedy()
    if rule.name == "typical":
        return Typical(**rule.parameters)
    return Sampling(**rule.parameters, seed=source.seed or 0)  # type: ignore[arg-type]  # top_k is whole


def open_prompts(
    source: Source, target: Target, *, held_out: bool = True, most: int | None = None, drawn: int = 0
) -> PromptSet:
    """The prompts of a session's options; for held_out and most of the demo's see `demo_prompts`.

    drawn : conversations that are held at least, see `order_of`
    """
    name, order = prompts_name(source), order_of(source, drawn)
    if name == demo.NAME:
        return demo_prompts(target, held_out=held_out, most=most, seed=order.seed, group_by=source.group_by)
    return load_prompts(
        target,
        name,
        order=order,
        column=source.column,
        group_by=source.group_by,
        responses=source.responses,
        split=source.split,
        chat_template=source.chat_template,
    )


def prompts_name(source: Source) -> str:
    """A file, a folder, a datasets id or "demo"; InvalidInput where prompts are missing."""
    if source.prompts is None and source.model not in (None, demo.NAME):
        raise InvalidInput(
            "`prompts` is needed with a model of your own, since trees and heads are only as good as the prompts "
            "behind them: pass a file (.jsonl, .json, .csv, .parquet, .txt) or a datasets id."
        )
    name = source.prompts or demo.NAME
    if name == demo.NAME and (source.column or source.responses or source.split):
        raise InvalidInput("`column`, `responses` and `split` need `prompts`: the demo's are plain text.")
    return name


def _skipped_note(prompts: PromptSet) -> tuple[str, ...]:
    """Sentences on prompts that were left out, where some were."""
    twice = (f"{prompts.n_repeated:,} prompts left out that ask what an earlier one asks.",) * (prompts.n_repeated > 0)
    if not prompts.skipped:
        return twice
    first, some = prompts.skipped[0], len(prompts.skipped)
    listed = "all" if some == prompts.n_skipped else f"the first {some:,}"
    return (
        f"{prompts.n_skipped:,} prompts left out, the first at row {first.row}: {first.reason}. "
        f"calibration.json lists {listed}.",
        *twice,
    )


OUTLINE = {
    "target": ("name", "revision", "device", "dtype", "tokenizer", "eos_ids", "vocab_size", "context"),
    "drafter": ("num_heads", "widest", "draft_vocab_size", "has_probabilities", "has_marginals"),
    "acceptance": ("record",),
}


def open_outline(source: Source, threads: int) -> Session:
    """A session that workers hold: of target, drafter and rule it has the plain attributes alone.

    The machine that gives the command so needs neither the memory nor the device that the model takes. The prompts travel
    whole, since they are read once, and the same for all.
    """
    session = open_in_worker(source, threads)
    parts: dict[str, Any] = {
        part: SimpleNamespace(**{name: getattr(getattr(session, part), name) for name in names})
        for part, names in OUTLINE.items()
    }
    return replace(session, **parts, known=session.provenance())


def open_in_worker(source: Source, threads: int, prompts: PromptSet | None = None) -> Session:
    """The session of the options, for these prompts where they are known already."""
    torch.set_num_threads(threads)
    return open_session(source, prompts)


def by_rejection(drafter: Drafter, target: Target, sampling: Greedy) -> tuple[SampledChain, Rejection]:
    """A draft model that draws its chains, and the rule that accepts them; InvalidInput for other drafters."""
    if not isinstance(drafter, DraftModel) or drafter.has_marginals:
        raise InvalidInput(
            "`rule=reject` needs a draft model that guesses token by token, `drafter=MODEL`, but the drafter is of the kind "
            f"{drafter.kind}: use `rule=sample`."
        )
    assert isinstance(sampling, Sampling), "rejection samples"
    chains = SampledChain(drafter, target, sampling)
    return chains, Rejection(chains)
