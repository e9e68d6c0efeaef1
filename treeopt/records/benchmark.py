"""What real decoding measured, contender by contender: ``bench.json``, and their ratios."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.files import storage
from treeopt.records.agreement import SUMS, agree, at_place, rounding, within
from treeopt.records.bootstrap import BOOTSTRAPS, SEED, conversation_draws, interval95
from treeopt.records.contender import Contender, Quality
from treeopt.records.display import Drawn
from treeopt.records.origins import Acceptance, check_origins
from treeopt.records.stopping import FEWEST_BLOCKS, look_interval, rates_ratio


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A ratio of two contenders' tokens per second, with its 95 % interval (None for too few blocks)."""

    value: float
    low: float | None
    high: float | None

    def check(self) -> None:
        """Raise InvalidInput for a ratio outside its interval, or below 0."""
        ends = self.low, self.high
        slack = SUMS + sum(rounding(number) for number in (self.value, *ends) if number is not None)
        within(0, inf if ends[1] is None else ends[1] + slack, speedup=self.value)
        within(0 if ends[0] is None else ends[0] - slack, speedup=self.value)

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.value:.2f}{interval}"


@dataclass(frozen=True, kw_only=True)
class Benchmark(Drawn):
    """All contenders of one run; they decoded the same prompts, interleaved.

    prompts    : "held out", or "trace" for those of the calibration
    inputs     : file -> sha256 of what the contenders were predicted from
    quality    : contender -> its texts as judged by the target, where they depend on the tree
    loop_share : share of the plain answers that ended in a loop
    skipped    : prompts or turns that were left out, and why
    """

    contenders: tuple[Contender, ...]
    dtype: str = "unknown"
    rounds: int = 1
    prompts: str | None = None
    inputs: dict[str, str] | None = None
    quality: dict[str, Quality] | None = None
    max_new_tokens: int | None = None
    loop_share: float | None = None
    skipped: list[dict[str, Any]] | None = None
    provenance: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.contenders:
            raise InvalidInput("A benchmark must have contenders.")

    def contender(self, name: str) -> Contender:
        for contender in self.contenders:
            if contender.name == name:
                return contender
        names = ", ".join(c.name for c in self.contenders)
        raise InvalidInput(f"The benchmark has the contenders {names}, but {name!r} was asked.")

    @property
    def stopped(self) -> list[Contender]:
        """Contenders that lost by far, and stopped early."""
        return [contender for contender in self.contenders if contender.stopped_after is not None]

    @property
    def groups(self) -> list[str]:
        """Groups of the prompts, in order; empty where they are not grouped."""
        names = dict.fromkeys(block.group for block in self.contenders[0].blocks)
        return list(names) if any(names) else []

    def tokens_per_step(self, name: str, group: str) -> tuple[float, int]:
        """Tokens per step of a contender on the answers of a group, and how many they are."""
        answers = [answer for answer in self.contender(name).sequences if answer.group == group]
        steps = sum(answer.steps for answer in answers)
        return (sum(a.emitted for a in answers) / steps if steps else 1.0), len(answers)

    def speedup(self, name: str, baseline: str = "plain", *, group: str | None = None) -> Ratio | None:
        """Tokens per second over the baseline's, paired by block and round, bootstrapped over blocks.

        None where nothing was timed (every block had too few prompts for a full batch). Where one of them stopped early,
        it is of what both decoded, with the interval of the look that stopped it (`treeopt.records.stopping`).
        """
        pairs = self._paired(name, baseline, group)
        if not len(pairs):
            return None
        if {name, baseline} & {contender.name for contender in self.stopped}:
            low, high = look_interval(pairs) or (None, None)
            return Ratio(value=float(rates_ratio(pairs.sum(0))), low=low, high=high)
        return _with_interval(
            rates_ratio(pairs.sum(0)), rates_ratio(conversation_draws(len(pairs)) @ pairs), len(pairs)
        )

    def overhead(self, name: str) -> Ratio | None:
        """Latency of a step over that of a plain one (Medusa, appendix B): the median over blocks.

        A block's plain steps were timed next to its others, so a disturbed block is one ratio of many.
        """
        pairs = self._paired(name, "plain", per="steps")
        if not len(pairs):
            return None
        ratios = 1 / rates_ratio(pairs)
        picks = np.random.default_rng(SEED).integers(0, len(ratios), (BOOTSTRAPS, len(ratios)))
        return _with_interval(np.median(ratios), np.median(ratios[picks], axis=1), len(ratios))

    def _paired(self, name: str, baseline: str, group: str | None = None, *, per: str = "tokens") -> Any:
        """(blocks, 4) tokens (or steps) and seconds of the contender and of the baseline, rounds that both have added up."""
        sums: dict[tuple[int, ...], list[float]] = {}
        both = [self.contender(which).blocks for which in (name, baseline)]
        ours, theirs = ({(block.round, *block.prompts) for block in blocks} for blocks in both)
        for place, blocks in enumerate(both):
            for block in blocks:
                if group not in (None, block.group) or (block.round, *block.prompts) not in ours & theirs:
                    continue
                row = sums.setdefault(tuple(block.prompts), [0.0] * 4)
                row[2 * place] += getattr(block, per)
                row[2 * place + 1] += block.decode_s
        return np.array([row for row in sums.values() if row[1] > 0 and row[3] > 0])

    @property
    def engine(self) -> str:
        """The runtime that decoded, with its version; empty for treeopt's own decoder."""
        engine = (self.provenance or {}).get("engine") or {}
        return f"{engine.get('name')} {engine.get('version')}" if engine else ""

    @property
    def about_engine(self) -> str:
        """What predictions lack in that runtime, in a sentence; empty where they lack nothing."""
        return ((self.provenance or {}).get("engine") or {}).get("about") or ""

    @property
    def judged(self) -> str:
        """The contender that is judged: the plan's tree, or in another runtime what stands for it."""
        names = [contender.name for contender in self.contenders]
        return names[1] if self.engine and "chosen" not in names and len(names) > 1 else "chosen"

    @property
    def acceptance(self) -> Acceptance:
        """The rule that was decoded by; empty where the file does not say."""
        known: Acceptance = (self.provenance or {}).get("acceptance") or Acceptance()
        return known

    def document(self) -> dict[str, Any]:
        """What ``bench.json`` says; keys of the run that are not known are left out."""
        known = {key: value for key, value in asdict(self).items() if value is not None}
        for contender in known["contenders"]:
            contender["predicted"] = contender["predicted"] if any(contender["predicted"].values()) else {}
            for later in ("stopped_after", "dynamic"):
                if contender[later] is None:
                    del contender[later]
            for answer in contender["sequences"]:
                if answer["prefilled"] == 1:  # as it is with treeopt's own decoder
                    del answer["prefilled"]
        return {"schema": storage.schema("bench"), **known}

    def save(self, path: str | Path) -> None:
        storage.write_json(path, "bench", self.document())

    @classmethod
    def load(cls, path: str | Path) -> Benchmark:
        document = storage.read_json(path, "bench", required=("contenders",))
        check_origins(document, path)
        bench = storage.typed(cls, document, path)
        bench.check(path)
        return bench

    def check(self, source: str | Path) -> None:
        """Raise InvalidInput, with the place in the file ``source``, where numbers contradict one another."""
        first = self.contenders[0]
        with at_place(source, "the top"):
            within(1, rounds=self.rounds, max_new_tokens=self.max_new_tokens)
            within(0, 1, loop_share=self.loop_share)
            if first.blocks:
                agree("rounds", self.rounds, 1 + max(block.round for block in first.blocks), "those of the blocks")
        for i, contender in enumerate(self.contenders):
            contender.check(source, f"contenders.{i}", self.max_new_tokens)
            with at_place(source, f"contenders.{i}"):
                self._check_alike(first, contender)
        for name, quality in (self.quality or {}).items():
            with at_place(source, f"quality.{name}"):
                quality.check(self.contender(name))

    def _check_alike(self, first: Contender, other: Contender) -> None:
        """Raise InvalidInput unless two contenders decoded the same prompts, or one that stopped some of them."""
        agree("batch_size", other.batch_size, first.batch_size, f"that of {first.name}")
        ours, theirs = (sorted((b.round, b.prompts) for b in c.blocks) for c in (other, first))
        answers, whole = first.sequences, other.stopped_after is None
        if whole:
            agree("compared", other.compared, first.compared, f"that of {first.name}")
        else:
            decoded = {i for block in other.blocks for i in block.prompts}
            answers = [answer for i, answer in enumerate(answers) if i in decoded]
            theirs = [block for block in theirs if block in ours]
        ids = [[answer.id for answer in some] for some in (other.sequences, answers)]
        for what, mine, of_first in (("sequences", *ids), ("blocks", ours, theirs)):
            if mine and (of_first or not whole) and mine != of_first:
                raise InvalidInput(f"The {what} must be of the same prompts as those of {first.name}, but are not.")
        if not whole:
            return
        replayed = [c.replayed_steps and c.replayed_tokens_per_step for c in (first, other)]
        if all(replayed) and all(a.identical or a.prefilled == 1 for c in (first, other) for a in c.sequences):
            tokens = [
                (c.replayed_steps or 0) * (c.replayed_tokens_per_step or 0.0)
                + sum(a.prefilled - 1 for a in c.sequences)
                for c in (first, other)
            ]
            rates = [c.replayed_tokens_per_step for c in (first, other)]
            agree("replayed_steps x replayed_tokens_per_step", tokens[1], tokens[0], f"that of {first.name}", *rates)


def _with_interval(value: Any, samples: Any, blocks: int) -> Ratio:
    """A ratio, and its 95 % interval by bootstrap samples over so many blocks."""
    low, high = interval95(samples, blocks) if blocks >= FEWEST_BLOCKS else (None, None)
    return Ratio(value=float(value), low=low, high=high)
