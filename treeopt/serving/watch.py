"""A server looked at while it serves: scrapes of its /metrics, and its pace at each number of running requests.

scrape   the lines of one look that are needed, and when it was
stretch  scrapes between which nothing fell that is counted: a restart of the server begins another
tokens, steps, seconds   of decoding, of all requests together; a step of a request is one pass that it took part in

tokens / steps : tokens per step · seconds / steps : a step · seconds / tokens : a token of one request. Prefills are in none
of them but by the time for which they hold decoding up.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

from treeopt.engines.measured.exposition import Series, is_exposition, series_of
from treeopt.engines.measured.files import load_file
from treeopt.engines.measured.survival import MOST_DRAFTS
from treeopt.errors import InvalidInput, TreeoptError, Unsupported
from treeopt.files.parameters import Count, Positive
from treeopt.files.storage import document, schema, typed
from treeopt.records.bootstrap import conversation_draws, interval95
from treeopt.records.calibration import Calibration
from treeopt.records.estimate import Estimate
from treeopt.serving.client import WITHIN_S, NoSuchPage, Server

EVERY_S, BLOCK_S = 1.0, 10.0  # between scrapes; of what the bootstrap draws, since neighbours are alike
ALIKE = 0.1  # by which running requests may differ between two scrapes that count for one number of them
PAGES = ("/metrics", "/prometheus/metrics")
MOST_COUNTS = 1000  # that are needed of a scrape
RESTARTED = "The server restarted while it was watched: what it did before is left out."


@dataclass(frozen=True, kw_only=True)
class Watching:
    """How a server is watched.

    minutes   : how long to watch, with each number of ``clients``
    plain     : a server without a drafter to be watched beside it, or scrapes.jsonl of one that was watched before
    drafter   : what makes the drafts, which counters do not say: eagle3, draft-model, ngram, mtp
    drive     : file of prompts to send, in closed loops; by default nothing is sent but GETs
    clients   : how many prompts are sent at once, one number after another
    overwrite : replace the run's trace, calibration and recordings
    """

    minutes: Positive = 5
    plain: str | None = None
    drafter: str | None = None
    drive: str | None = None
    clients: Sequence[Count] = (1,)
    overwrite: bool = False

    @property
    def plain_url(self) -> str | None:
        """The server without a drafter, where it is up."""
        return self.plain if self.plain and "://" in self.plain else None


@dataclass(frozen=True)
class Names:
    """What an engine calls what is needed, without ``prefix``; of several names the later ones are taken from the first.

    at_end : whether it counts a request when that ends
    """

    prefix: str
    running: str
    seconds: str = ""
    tokens: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    at_end: bool = False

    @property
    def needed(self) -> str:
        """A regular expression of the lines that are read: these, and counters of drafts."""
        names = (self.running, self.seconds, *self.tokens, *self.steps)
        return rf"{self.prefix}(?=spec_|{'|'.join(rf'{name}(?:[ {{]|$)' for name in names if name)})"


ENGINES = {
    # A sample for each output of a request, which is a step, whatever tokens are in it; the first token is none.
    "vllm": Names(r"(?:ray_)?vllm[:_]", "num_requests_running", "inter_token_latency_seconds_sum",
                  ("generation_tokens_total", "time_to_first_token_seconds_count"), ("inter_token_latency_seconds_count",)),
    # A step gives what was accepted and a token of its own; the first token is counted with a step.
    "llama-cpp": Names(r"llamacpp:", "requests_processing", "tokens_predicted_seconds_total", ("tokens_predicted_total",),
                       ("tokens_predicted_total", "spec_decode_num_accepted_tokens_total"), at_end=True),
    # Gaps between tokens sum to the same time, however many tokens came in one.
    "sglang": Names(r"sglang:", "num_running_reqs", "inter_token_latency_seconds_sum",
                    ("generation_tokens_total", "num_requests_total"), ("spec_verify_calls_total",)),
    "tensorrt-llm": Names(r"trtllm_", "num_requests_running"),
}  # fmt: skip


class Scrape(TypedDict):
    """A line of ``scrapes.jsonl``."""

    at_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    metrics: str


@dataclass(frozen=True, eq=False)
class Pace:
    """Decoding at one number of running requests: (tokens, steps, seconds) of every block, a row each."""

    blocks: np.ndarray[tuple[int, int], np.dtype[np.float64]]

    @property
    def sums(self) -> tuple[float, float, float]:
        tokens, steps, seconds = self.blocks.sum(0).tolist()
        return tokens, steps, seconds

    @property
    def tokens_per_step(self) -> float:
        return self.sums[0] / self.sums[1]

    @property
    def step_ms(self) -> float:
        return 1000 * self.sums[2] / self.sums[1]

    @property
    def token_ms(self) -> float:
        return 1000 * self.sums[2] / self.sums[0]


def engine_of(text: str) -> str | None:
    """The engine whose names a scrape has.

    >>> engine_of("llamacpp:requests_processing 1"), engine_of("up 1")
    ('llama-cpp', None)
    """
    return next((name for name, names in ENGINES.items() if is_exposition(text, names.needed)), None)


async def watch(server: Server, seconds: float, scrapes: list[Scrape]) -> list[str]:
    """Add a scrape every second, for so long; only GETs. Returns what went wrong now and then.

    The first scrape must succeed: InvalidInput and Unsupported say why it does not.
    """
    import anyio

    began, failed, why = time.monotonic(), 0, ""
    page, text = PAGES[0], ""
    for page in PAGES:
        try:
            text = await server.metrics(page)
        except NoSuchPage:
            continue
        if engine_of(text):
            break
    name = engine_of(text)
    if name is None:
        raise Unsupported(
            f"{server.url} must show the counters of {', '.join(ENGINES)} under {' or '.join(PAGES)}, but does not. Start "
            "llama-server with --metrics, SGLang with --enable-metrics, TensorRT-LLM with return_perf_metrics: true."
        )
    scrapes.append(_kept(text, name, server.url))
    while (left := began + seconds - time.monotonic()) >= EVERY_S:
        await anyio.sleep(EVERY_S)
        try:
            scrapes.append(_kept(await server.metrics(page, min(WITHIN_S, left)), name, server.url))
        except TreeoptError as error:
            failed, why = failed + 1, str(error)
    return [f"{failed} looks at {page} failed, the last because: {why}"] * bool(failed)


def _kept(text: str, engine: str, source: object) -> Scrape:
    """The lines that are needed, once they are counts."""
    counts_of(text, engine, source)
    lines = [line for line in text.splitlines() if re.match(ENGINES[engine].needed, line)]
    return {"at_s": time.monotonic(), "metrics": "\n".join(lines) + "\n"}


def counts_of(text: str, engine: str, source: object) -> dict[Series, float]:
    """What is needed of a scrape; InvalidInput where it is none of the engine's, too much, or no counts."""
    counts = series_of(text, source, ENGINES[engine].needed)
    if not 0 < len(counts) <= MOST_COUNTS or any(not 0 <= value <= MOST_DRAFTS for value in counts.values()):
        raise InvalidInput(
            f"{source} must show up to {MOST_COUNTS} counts of {engine} from 0 to {MOST_DRAFTS} all the time, but shows others."
        )
    return counts


def read_scrapes(path: Path) -> list[Scrape]:
    """The scrapes of a file of scrapes in JSON lines; InvalidInput where it holds something else."""
    content = load_file(path) or [None]
    return typed(list[Scrape], content if isinstance(content, list) else [content], path)


@dataclass(frozen=True)
class Stretch:
    """Scrapes of a server since its last restart, and their counts: all series of a name together."""

    engine: str
    scrapes: Sequence[Scrape]
    counts: Sequence[Mapping[str, float]]

    def rise(self, name: str, begin: int = 0, end: int = -1) -> float:
        return self.counts[end].get(name, 0.0) - self.counts[begin].get(name, 0.0)

    def decoded(self, begin: int = 0, end: int = -1) -> tuple[float, float, float] | None:
        """(tokens, steps, seconds) between two scrapes; None for an engine that does not count them.

        Where no steps are counted every token takes one.
        """
        names, rise = ENGINES[self.engine], partial(self.rise, begin=begin, end=end)
        if not names.seconds:
            return None
        tokens, steps = (rise(first) - sum(map(rise, less)) for first, *less in (names.tokens, names.steps))
        return tokens, steps if steps > 0 else tokens, rise(names.seconds)

    def paces(self) -> dict[int, Pace]:
        """The pace at each number of running requests that stood still between two scrapes."""
        names = ENGINES[self.engine]
        found: dict[int, list[list[Any]]] = {}
        for begin, end in pairwise(range(len(self.scrapes))):
            ends = [self.counts[place].get(names.running, 0.0) for place in (begin, end)]
            came, size = self.decoded(begin, end), round(sum(ends) / 2)
            # What is counted when a request ends was of those that ran before.
            if names.at_end:
                size = round(ends[0])
            elif abs(ends[0] - ends[1]) > ALIKE * size:
                continue
            blocks = found.setdefault(size, [])
            if not blocks or (blocks[-1][3] >= BLOCK_S and min(blocks[-1][:3]) > 0):
                blocks.append([0.0] * 4)
            more = (*(came or (0, 0, 0)), self.scrapes[end]["at_s"] - self.scrapes[begin]["at_s"])
            blocks[-1] = [a + b for a, b in zip(blocks[-1], more, strict=True)]
        kept = {
            size: np.array([block[:3] for block in found[size] if min(block[:3]) > 0]) for size in sorted(found) if size
        }
        return {size: Pace(blocks) for size, blocks in kept.items() if len(blocks)}


def last_stretch(scrapes: Sequence[Scrape], source: object) -> tuple[Stretch, list[str]]:
    """What was seen since the last restart, and a note where there was one. InvalidInput for less than two."""
    engine = engine_of(scrapes[0]["metrics"]) if scrapes else None
    if engine is None:
        raise InvalidInput(f"{source} must hold scrapes of {', '.join(ENGINES)}, but holds none.")
    read = [counts_of(scrape["metrics"], engine, source) for scrape in scrapes]
    begin = max((i for i, (old, new) in enumerate(pairwise(read), 1) if _restarted(old, new)), default=0)
    if len(scrapes) - begin < 2:
        raise InvalidInput(
            f"{source} must be looked at twice since its last restart, but was once: watch it for longer."
        )
    sums = [dict[str, float]() for _ in read[begin:]]
    for counts, total in zip(read[begin:], sums, strict=True):
        for (name, _), value in counts.items():
            total[name] = total.get(name, 0.0) + value
    return Stretch(engine, scrapes[begin:], sums), [RESTARTED] * (begin > 0)


def _restarted(old: dict[Series, float], new: dict[Series, float]) -> bool:
    counted = [series for series in old if series[0].endswith(("_total", "_sum", "_count"))]
    created = [series for series in old.keys() & new.keys() if series[0].endswith("_created")]
    return any(new.get(one, -1.0) < old[one] for one in counted) or any(new[one] != old[one] for one in created)


def over_plain(mine: Sequence[Pace], plain: Sequence[Pace]) -> Estimate:
    """How many times plain's throughput the same requests have, over batch sizes in the shares that they were served.

    The interval is by a bootstrap over blocks of time; None where a batch size has fewer than two of either.
    """
    draws, without, taken = [], 0.0, 0.0
    for i, (one, other) in enumerate(zip(mine, plain, strict=True)):
        a, b = (
            conversation_draws(len(pace.blocks), seed=2 * i + j) @ pace.blocks for j, pace in enumerate((one, other))
        )
        draws.append(np.stack([a[:, 0] * b[:, 2] / b[:, 0], a[:, 2]]))
        without += one.sums[0] * other.token_ms / 1000
        taken += one.sums[2]
    fewest = min(len(pace.blocks) for pace in (*mine, *plain))
    top, low = np.sum(draws, axis=0)
    return Estimate(without / taken, None, *(interval95(top / low, fewest) if fewest > 1 else ()))


@dataclass(frozen=True, kw_only=True, eq=False)
class Tuned:
    """What a server did while it was watched.

    tokens_per_step : of all its steps; None where it does not count its tokens, nor drafts by position
    paces, plain    : by running requests, of the server and of one without a drafter
    over_plain      : how many times plain's throughput it has, over the batch sizes of both
    command         : that starts it as planned; None where nothing can be planned
    unknown         : what could not be known, in sentences
    """

    engine: str
    model: str
    tokens_per_step: float | None = None
    paces: dict[int, Pace]
    plain: dict[int, Pace]
    over_plain: Estimate | None = None
    calibration: Calibration | None = None
    command: str | None = None
    unknown: tuple[str, ...]

    @property
    def survival(self) -> list[float]:
        return [] if self.calibration is None else list(self.calibration.meta["survival"])

    def document(self) -> dict[str, object]:
        figures = ("tokens_per_step", "step_ms", "token_ms")
        sizes = [{"batch_size": n, **{name: getattr(one, name) for name in figures}} for n, one in self.paces.items()]
        plain = [{"batch_size": n, "step_ms": one.step_ms} for n, one in self.plain.items()]
        names = ("engine", "model", "tokens_per_step", "survival", "command", "unknown")
        known = {name: getattr(self, name) for name in names}
        known["over_plain"] = document(self.over_plain)
        return {"schema": schema("tuned"), **known, "paces": sizes, "plain": plain}
