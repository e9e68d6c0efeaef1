"""What real decoding measured, contender by contender: ``bench.json``, and their ratios.

A contender stops when it is shown to be slower than the chosen tree long before the last block. There are three looks, after
an eighth, a quarter and half of the blocks. Repeated tests find differences by chance, so a look takes an interval of 99.9 %:
the bound of Haybittle (1971) and Peto et al. (1976, Br. J. Cancer 34, 585), which leaves the intervals at the end as they are.
A contender that stopped keeps the interval of its look, as repeated confidence intervals do (Jennison and Turnbull 1989,
J. R. Statist. Soc. B 51, 305): whatever stops, at most 5 % + 3 x 0.1 % of the reported intervals miss the truth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from treeopt.errors import InvalidInput
from treeopt.files.fields import Positive, Share
from treeopt.records.bootstrap import SEED, conversation_draws, interval95, stderr
from treeopt.records.contender import Block, Contender, Quality
from treeopt.records.estimate import Estimate
from treeopt.records.figure import Figure
from treeopt.records.origins import JsonRecord, Provenance, RuleRecord, Runtime, SkippedRow

FEWEST_BLOCKS = 5  # below it no interval is given
FEWEST_LAUNCHES = 3  # below it no interval is given
LOOKS = (8, 4, 2)  # after one block in so many
AS_IT_COMES = "default plain"  # the contender that is plain decoding by an engine as it comes, beside an exact one
IDLE = "chain of 0"  # the contender whose engine has a drafter that is told to guess nothing
ERROR = 0.001  # of an interval at a look


@dataclass(frozen=True, kw_only=True, repr=False)
class Benchmark(JsonRecord):
    """All contenders of one run; they decoded the same prompts, interleaved.

    prompts    : "held out"
    inputs     : file -> sha256 of what the contenders were predicted from
    quality    : contender -> its texts as judged by the target, where they depend on the tree
    loop_share : share of the plain answers that ended in a loop
    skipped    : prompts or turns that were left out, and why
    processor_share : processor time of the process over the time that decoding took; None on other devices
    """

    file_kind = "bench"
    contenders: Annotated[tuple[Contender, ...], Field(min_length=1)]
    dtype: str = "unknown"
    prompts: str | None = None
    inputs: dict[str, str] | None = None
    quality: dict[str, Quality] | None = None
    max_new_tokens: Positive | None = None
    loop_share: Share | None = None
    skipped: list[SkippedRow] | None = None
    provenance: Provenance | None = None
    processor_share: Share | None = None

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
        return [contender for contender in self.contenders if contender.stopped]

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

        The interval is by a bootstrap over blocks, and over launches too where rounds are launches. None where nothing was
        timed (every block had too few prompts for a full batch). Where one of the two stopped early, the ratio is of what both
        decoded, with the interval of the look that stopped it.
        """
        baseline = baseline or self.baseline
        both = [[b for b in self.contender(each).blocks if group in (None, b.group)] for each in (name, baseline)]
        pairs = paired(*both)
        if not len(pairs):
            return None
        ends = None
        if self.is_launched:
            ends = launches_interval(*both) if name != baseline else (1.0, 1.0)
        elif {name, baseline} & {contender.name for contender in self.stopped}:
            ends = look_interval(pairs)
        elif len(pairs) >= FEWEST_BLOCKS:
            ends = interval95(rates_ratio(conversation_draws(len(pairs)) @ pairs), len(pairs))
        return Estimate(float(rates_ratio(pairs.sum(0))), None, *(ends or ()))

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
    def judged(self) -> str:
        """The contender that is judged: the plan's tree, or what stands for it in another runtime."""
        names = [contender.name for contender in self.contenders]
        return names[1] if self.engine and "chosen" not in names and len(names) > 1 else "chosen"

    @property
    def acceptance(self) -> RuleRecord:
        """The rule that was decoded by; empty where the file does not say."""
        known: RuleRecord = (self.provenance and self.provenance.acceptance) or RuleRecord()
        return known

    @property
    def shown(self) -> dict[str, object]:
        speedups = {c.name: speedup for c in self.contenders if (speedup := self.speedup(c.name))}
        return {"rounds": self.rounds, "speedup": speedups}


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


def look_interval(pairs: Any) -> tuple[float, float] | None:
    """The interval of a ratio of rates at a look; None for too few blocks.

    pairs : (n, 4) of `rates_ratio`

    By Student's t on the logarithm, with the bootstrap's standard error: so far out percentiles would need more draws.
    """
    from scipy.stats import t

    pairs = np.asarray(pairs, dtype=float)
    pairs = pairs[(pairs[:, 1] > 0) & (pairs[:, 3] > 0)]
    if (n := len(pairs)) < FEWEST_BLOCKS:
        return None
    middle, error = np.log(rates_ratio(pairs.sum(0))), stderr(np.log(rates_ratio(conversation_draws(n) @ pairs)), n)
    reach = t.ppf(1 - ERROR / 2, n - 1) * error
    return float(np.exp(middle - reach)), float(np.exp(middle + reach))


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


def loses_by_far(pairs: Any) -> bool:
    """Whether a contender is shown to be slower than another by a look's interval.

    >>> loses_by_far([[50, 1.0, 80, 1.0], [50, 1.1, 82, 1.1]] * 3), loses_by_far([[50, 1.0, 80, 1.0]] * 4)
    (True, False)
    """
    ends = look_interval(pairs)
    return ends is not None and ends[1] < 1
