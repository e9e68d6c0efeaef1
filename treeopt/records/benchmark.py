"""What real decoding measured, contender by contender: ``bench.json``, and their ratios.

A benchmark goes on until its ratios are settled, so their intervals must hold however often one looks. They are asymptotic
confidence sequences (Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas 2024, Ann. Statist. 52, 2613) on what each block adds to
the logarithm of a ratio, with Student's t for the first few blocks: in 95 % of benchmarks all looks have the truth within them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from treeopt.errors import InvalidInput
from treeopt.files.fields import NotNegative, Positive, Share
from treeopt.files.storage import document
from treeopt.records.bootstrap import LEVEL, SEED, conversation_draws, stderr
from treeopt.records.contender import Block, Contender, Quality
from treeopt.records.estimate import Estimate
from treeopt.records.figure import FLAT, Figure
from treeopt.records.origins import JsonRecord, Provenance, RuleRecord, Runtime, SkippedRow

FEWEST_BLOCKS = 5  # below it no interval is given
FEWEST_LAUNCHES = 3  # below it no interval is given
AS_IT_COMES = "default plain"  # the contender that is plain decoding by an engine as it comes, beside an exact one
IDLE = "chain of 0"  # the contender whose engine has a drafter that is told to guess nothing
CHOSEN = "chosen"  # the contender with the plan's draft, unless another one has it too
NARROWEST = 32  # blocks after which an interval is as narrow as one that holds at all looks can be


@dataclass(frozen=True, kw_only=True, repr=False)
class Benchmark(JsonRecord):
    """All contenders of one run; they decoded the same prompts, interleaved.

    contenders      : each with its speedup over plain decoding, or over `default plain` where that is faster
    dtype           : number format
    prompts         : `held out`
    inputs          : file to sha256 of what the contenders were predicted from
    quality         : contender to its texts as judged by the target, where they depend on the tree
    max_new_tokens  : limit of an answer
    loop_share      : share of the plain answers that ended in a loop
    skipped         : prompts or turns that were left out, and why
    provenance      : whose measurement it is
    processor_share : processor time of the process over the time that decoding took; less than 0.8: the machine
                      was busy
    judged          : the contender that decodes as the plan has it
    time_limit_s    : limit of the decoding, where that ended it
    """

    file_kind = "bench"
    first_keys = ("contenders", "rounds")
    contenders: Annotated[tuple[Annotated[Contender, FLAT], ...], Field(min_length=1)]
    dtype: str = "unknown"
    prompts: str | None = None
    inputs: dict[str, str] | None = None
    quality: dict[str, Quality] | None = None
    max_new_tokens: Positive | None = None
    loop_share: Share | None = None
    skipped: list[SkippedRow] | None = None
    provenance: Provenance | None = None
    processor_share: Share | None = None
    judged: str = CHOSEN
    time_limit_s: NotNegative | None = None

    def contender(self, name: str) -> Contender:
        known = {contender.name: contender for contender in self.contenders}
        if name not in known:
            raise InvalidInput(f"The benchmark has the contenders {', '.join(known)}, but {name!r} was asked.")
        return known[name]

    @property
    def rounds(self) -> int:
        """Times that every contender decoded every prompt."""
        return 1 + max((block.round for block in self.contenders[0].blocks), default=0)

    @property
    def stopped(self) -> list[Contender]:
        """Contenders that did not decode all that plain decoding did, since their comparison was settled."""
        return [c for c in self.contenders if len(c.blocks) < len(self.contenders[0].blocks)]

    @property
    def unsettled(self) -> dict[str, Estimate | None]:
        """The speed of the judged contender over each one that it is not told apart from, whose draft is another."""
        drafts = {contender.name: contender.draft for contender in self.contenders}
        rivals = [name for name, draft in drafts.items() if self.judged in drafts and draft != drafts[self.judged]]
        ratios = {name: self.speedup(self.judged, name) for name in rivals}
        return {name: ratio for name, ratio in ratios.items() if ratio is None or not ratio.is_settled}

    @property
    def groups(self) -> list[str]:
        names = dict.fromkeys(block.group for block in self.contenders[0].blocks)
        return list(names) if any(names) else []

    @property
    def baseline(self) -> str:
        """The contender that speedups are over: plain decoding, the faster kind of it where there are two."""
        known = [c for c in self.contenders if c.name in ("plain", AS_IT_COMES)]
        return max(known, key=lambda c: c.tokens_per_s or 0.0).name if known else "plain"

    def speedup(self, name: str, baseline: str | None = None, *, group: str | None = None) -> Estimate | None:
        """Tokens per second over the baseline's, paired by block and round.

        It is of the blocks that both decoded; None where nothing was timed, since no block had prompts for a full batch.
        """
        baseline = baseline or self.baseline
        both = [[b for b in self.contender(each).blocks if group in (None, b.group)] for each in (name, baseline)]
        ratio = ratio_of(paired(*both))
        if ratio is None or not self.is_launched or name == baseline:
            return ratio
        return Estimate(ratio.value, None, *(launches_interval(*both) or ()))

    def figure(self, name: str) -> Figure:
        """What was measured of a contender; its latencies are those that give its tokens per second and its speedup."""
        contender, speedup = self.contender(name), self.speedup(name)
        rate, step_ms = contender.rate_of(), None
        if contender.tokens_per_s:
            step_ms = Estimate(1e3 * contender.batch_size * rate / contender.tokens_per_s)
        return Figure(
            draft=contender.draft,
            batch_size=contender.batch_size,
            tokens_per_step=Estimate(max(rate, 1.0), rate.stderr),
            step_ms=step_ms,
            plain_ms=speedup * step_ms / rate if speedup and step_ms else None,
            speedup=speedup,
        )

    @property
    def _runtime(self) -> Runtime:
        known: Runtime = (self.provenance and self.provenance.engine) or Runtime()
        return known

    @property
    def engine(self) -> str:
        """The runtime that decoded, with its version; empty for treeopt's own decoder."""
        return " ".join(filter(None, (self._runtime.get("name"), self._runtime.get("version"))))

    @property
    def is_launched(self) -> bool:
        """Whether every round of a contender launches a server, by the user's command, or an engine in a new process."""
        return bool(self._runtime.get("command") or self._runtime.get("launches"))

    @property
    def about_engine(self) -> str:
        """What predictions lack in that runtime, in a sentence; empty where they lack nothing."""
        return self._runtime.get("about") or ""

    @property
    def acceptance(self) -> RuleRecord:
        """The rule that was decoded by; empty where the file does not say."""
        known: RuleRecord = (self.provenance and self.provenance.acceptance) or RuleRecord()
        return known

    def document(self) -> dict[str, object]:
        contenders = [
            {"name": contender.name, "speedup": document(self.speedup(contender.name)), **document(contender)}
            for contender in self.contenders
        ]
        return {**super().document(), "contenders": contenders}


def block_prompts(batch_size: int) -> int:
    """Prompts that are decoded together: only steps with all rows live are timed, so there are some to refill rows with."""
    return 1 if batch_size == 1 else 2 * batch_size


def paired(ours: Sequence[Block], theirs: Sequence[Block]) -> Any:
    """(n, 4) of `rates_ratio`: what two contenders timed of each block of prompts, over the rounds of both."""
    ours_by, theirs_by = ({(b.round, *b.prompts): b for b in blocks} for blocks in (ours, theirs))
    sums: dict[tuple[int, ...], Any] = {}
    for key, block in ours_by.items():
        if other := theirs_by.get(key):
            row = [block.tokens, block.decode_s, other.tokens, other.decode_s]
            sums[key[1:]] = sums.get(key[1:], 0.0) + np.array(row)
    rows = [row for row in sums.values() if row[1] > 0 and row[3] > 0]
    return np.array(rows, dtype=float).reshape(-1, 4)


def rates_ratio(sums: Any) -> Any:
    """(..., 4) tokens, seconds, baseline's tokens, baseline's seconds to the ratio of rates."""
    return sums[..., 0] / sums[..., 1] / (sums[..., 2] / sums[..., 3])


def ratio_of(pairs: Any) -> Estimate | None:
    """The ratio of rates with its interval, which holds at all looks together; without one for too few blocks, None for no block.

    pairs : (n, 4) of `rates_ratio`

    >>> print(ratio_of(np.array([[50, 1.0, 80, 1.0], [50, 1.1, 82, 1.1]] * 3)), ratio_of(np.array([[50, 1.0, 80, 1.0]] * 4)))
    0.62 [0.59, 0.64] 0.62
    """
    from scipy.special import ndtr, stdtrit  # of scipy.stats, which takes a second to import

    if not (n := len(pairs)):
        return None
    ratio = float(rates_ratio(sums := pairs.sum(0)))
    if n < FEWEST_BLOCKS:
        return Estimate(ratio)
    error = (pairs / sums @ [1, -1, -1, 1]).std(ddof=1) * sqrt(n)  # of the logarithm
    miss = 1 - LEVEL
    share = n / NARROWEST * (log(1 - 2 * log(miss)) - 2 * log(miss))
    reach = sqrt(2 * (1 + 1 / share) * log(sqrt(1 + share) / miss))
    factor = exp(error * stdtrit(n - 1, ndtr(reach)))
    return Estimate(ratio, None, ratio / factor, ratio * factor)


def launches_interval(ours: Sequence[Block], theirs: Sequence[Block]) -> tuple[float, float] | None:
    """The 95 % interval of a ratio of rates where every round was a launch; None for too few of them, or of blocks.

    Launches are drawn, those of the two apart since they have nothing in common, and then blocks, the same of both. By Student's
    t on the logarithm with as many degrees of freedom as two samples of launches have, since percentiles of three are too near.
    """
    from scipy.stats import t

    prompts = sorted({tuple(b.prompts) for b in ours} & {tuple(b.prompts) for b in theirs})
    launches = [len({b.round for b in blocks}) for blocks in (ours, theirs)]
    if len(prompts) < FEWEST_BLOCKS or min(launches) < FEWEST_LAUNCHES:
        return None
    drawn, whole = zip(
        *(_log_rates(blocks, prompts, SEED + i) for i, blocks in enumerate((ours, theirs), 1)), strict=True
    )
    error = stderr(drawn[0] - drawn[1], min(launches))
    reach = float(t.ppf(0.975, sum(launches) - 2)) * error
    return tuple(np.exp([whole[0] - whole[1] - reach, whole[0] - whole[1] + reach]).tolist())


def _log_rates(blocks: Sequence[Block], prompts: Sequence[tuple[int, ...]], seed: int) -> tuple[Any, float]:
    """(B,) logarithm of tokens per second in draws of launches and of these blocks of prompts, and that over all."""
    rounds = sorted({b.round for b in blocks})
    sums = np.zeros((2, len(rounds), len(prompts)))
    for b in blocks:
        if tuple(b.prompts) in prompts:
            sums[:, rounds.index(b.round), prompts.index(tuple(b.prompts))] += b.tokens, b.decode_s
    of_rounds, of_prompts = conversation_draws(len(rounds), seed=seed), conversation_draws(len(prompts))
    tokens, seconds = ((of_rounds @ amounts * of_prompts).sum(1) for amounts in sums)
    total = sums.sum((1, 2))
    return np.log(np.maximum(tokens, 1e-9) / np.maximum(seconds, 1e-9)), float(np.log(total[0] / total[1]))
