"""A session: a target, its drafter, a rule and prompts, loaded and checked against each other."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from treeopt import __version__, demo
from treeopt.errors import InvalidInput
from treeopt.records.display import one_line
from treeopt.records.merging import WHOLE, Shard
from treeopt.records.origins import DrafterRecord, Provenance, Runtime
from treeopt.records.rules import OPTIONS, RULES
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
from treeopt.runtime.target import Target, device_name, load_target, uses_cuda_graphs


@dataclass(frozen=True, repr=False)
class Session:
    """A loaded target with its drafter and prompts."""

    target: Target
    drafter: Drafter
    drafter_record: DrafterRecord
    prompts: PromptSet
    given: bool = False  # whether the prompts come with answers
    notes: tuple[str, ...] = ()  # what loading repaired, left out, or found strange
    weights: str = "checkpoint"  # or "random weights"
    acceptance: Greedy = field(default_factory=Greedy)
    temperature: float | None = None  # at which given answers were sampled
    source: Mapping[str, object] = field(default_factory=dict)  # options that it was opened with; a trace keeps them
    shard: Shard = WHOLE  # of the prompts that are calibrated on, which of their blocks
    cluster: Cluster | None = None  # whose workers hold it, where this is an outline
    engine_python: str | None = None  # of the environment that has the engine that decodes
    known: Provenance | None = None  # of an outline: where its figures come from, as the worker tells it
    # Of answers of a log, by prompt; as a server's they go on in loops.
    limits: Mapping[tuple[int, ...], int] | None = None

    __repr__ = one_line

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
            "compiled": self.target.compiled,
            "cuda_graphs": uses_cuda_graphs(self.target),
        }
        if self.weights != "checkpoint":
            known["weights"] = self.weights
        return known


def open_session(source: Mapping[str, Any] | None = None, prompts: PromptSet | None = None) -> Session:
    """Load everything and raise InvalidInput where the parts do not belong together.

    source  : by the names of `ModelOptions`; and model, and drawn: how many conversations of the prompts are held, see
              `order_of`
    prompts : those of the source, where they have been read already
    """
    source = {name: value for name, value in (source or {}).items() if value is not None}
    rules, _ = open_rule(source), prompts_name(source)  # refused before anything is loaded
    target, placed = open_model(source), _given(source, "revision", "trust_remote_code")
    opened = open_drafter(source.get("drafter"), target, depth=source.get("draft_depth"), **placed)
    drafter: Drafter = opened.drafter
    if source.get("acceptance") == "reject":
        drafter, rules = by_rejection(drafter, target, rules)
    prompts, responses = prompts or open_prompts(source, target), "responses" in source
    return Session(
        target,
        drafter,
        opened.record,
        prompts,
        given=responses,
        notes=(*opened.notes, *_skipped_note(prompts)),
        acceptance=rules,
        temperature=source.get("temperature") if responses else None,
        source=source,
        engine_python=source.get("engine_python"),
    )


def _given(source: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    return {name: source[name] for name in names if name in source}


def open_model(source: Mapping[str, Any]) -> Target:
    placed = _given(source, "dtype", "device", "device_map", "revision", "trust_remote_code")
    return load_target(source.get("model", demo.NAME), **placed)


def open_rule(source: Mapping[str, Any]) -> Greedy:
    """The acceptance rule that a session's options ask for (one of `RULES`). Raises InvalidInput for options of another one.

    Rejection needs the draft model too: here it is sampling, and `by_rejection` makes the two of them. Where answers are
    given, a temperature alone is what they were sampled at, so that their rule is sample-then-match.

    >>> open_rule({"acceptance": "typical", "temperature": 0.5}).record["temperature"]
    0.5
    """
    name, temperature = source.get("acceptance"), source.get("temperature")
    if name is None and temperature and "responses" not in source:
        raise InvalidInput(
            f"`temperature={temperature}` needs a rule that samples: add `acceptance=sample` (lossless) or "
            "`acceptance=typical`."
        )
    name = name or ("sample" if temperature else "greedy")
    if name not in RULES:
        raise InvalidInput(f"`acceptance` must be one of {', '.join(RULES)}, but got {name!r}.")
    for option in ("delta", "epsilon", "top_k", "top_p"):
        if option in source and option not in OPTIONS[name]:
            raise InvalidInput(f"`{option}` is not for `acceptance={name}`: leave it out.")
    if name == "greedy":
        if temperature:
            raise InvalidInput(f"`acceptance=greedy` has no temperature: leave `temperature={temperature}` out.")
        return Greedy()
    options = _given(source, "temperature", *OPTIONS[name])
    return Typical(**options) if name == "typical" else Sampling(**options)


def open_prompts(
    source: Mapping[str, Any], target: Target, *, held_out: bool = True, most: int | None = None
) -> PromptSet:
    """The prompts of a session's options; for held_out and most of the demo's see `demo_prompts`."""
    name, order = prompts_name(source), order_of(source)
    if name == demo.NAME:
        return demo_prompts(target, held_out=held_out, most=most, seed=order.seed, **_given(source, "group_by"))
    columns = _given(source, "column", "group_by", "responses", "chat_template", "split")
    return load_prompts(target, name, order=order, **columns)


def prompts_name(source: Mapping[str, Any]) -> str:
    """A file, a folder, a datasets id or "demo"; InvalidInput where prompts are missing."""
    name: str = source.get("prompts", demo.NAME)
    if source.get("model", demo.NAME) != demo.NAME and "prompts" not in source:
        raise InvalidInput(
            "`prompts` is needed with a model of your own, since trees and heads are only as good as the prompts "
            "behind them: pass a file (.jsonl, .json, .csv, .parquet, .txt) or a datasets id."
        )
    if name == demo.NAME and not source.keys().isdisjoint(("column", "responses", "split")):
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


def open_outline(source: Mapping[str, Any], threads: int) -> Session:
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


def open_in_worker(source: Mapping[str, Any], threads: int, prompts: PromptSet | None = None) -> Session:
    """The session of the options, for these prompts where they are known already."""
    torch.set_num_threads(threads)
    return open_session(source, prompts)


def by_rejection(drafter: Drafter, target: Target, sampling: Greedy) -> tuple[SampledChain, Rejection]:
    """A draft model that draws its chains, and the rule that accepts them; InvalidInput for other drafters."""
    if not isinstance(drafter, DraftModel) or drafter.has_marginals:
        raise InvalidInput(
            "`acceptance=reject` needs a draft model that guesses token by token, `drafter=MODEL`, but the drafter is of the kind "
            f"{drafter.kind}: use `acceptance=sample`."
        )
    assert isinstance(sampling, Sampling), "rejection samples"
    chains = SampledChain(drafter, target, sampling)
    return chains, Rejection(chains)
