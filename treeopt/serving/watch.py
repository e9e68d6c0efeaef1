"""A server looked at while it serves: what its /metrics counted since its last restart, and its pace at each load.

look     the counts of one second that are needed, all engines of a server together
tokens, steps, seconds   of decoding, of all requests together; a step of a request is one pass that it took part in

tokens / steps : tokens per step · seconds / steps : a step · seconds / tokens : a token of one request. Prefills are in none
of them but by the time for which they hold decoding up.

A figure is believed where a step of up to K guesses gives 1 to K + 1 tokens, in a time that a step may take.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field

from treeopt.engines.measured.exposition import COUNTERS, Series, is_exposition, series_of
from treeopt.engines.measured.survival import MOST_DRAFTS
from treeopt.errors import InvalidInput, TreeoptError, Unsupported
from treeopt.files.notes import note
from treeopt.files.storage import document, read_json, schema, typed, write_json
from treeopt.records.bootstrap import conversation_draws, interval95
from treeopt.records.calibration import Calibration
from treeopt.records.display import Displayed
from treeopt.records.estimate import Estimate
from treeopt.serving.client import Loading, NoSuchPage, Server
from treeopt.trees.tree import MOST_DEPTH

LOADING_S = 300.0  # that a server may take to load its model
EVERY_S, BLOCK_S = 1.0, 10.0  # between looks; of what the bootstrap draws, since neighbours are alike
MOST_BETWEEN_S = 30.0  # two looks that are counted for one load
ALIKE = 0.1  # by which running requests may differ between two looks that count for one number of them
PAGES = ("/metrics", "/prometheus/metrics")
MOST_COUNTS = 1000  # that are needed of a page
COUNTED = ("_total", "_sum", "_count")  # endings of names that only rise
KIND = "watched"
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
STEP_MS = (0.05, 1e5)  # that a step may take
UNEVEN = 0.05  # of the steps, by which tokens may be off: not all counts of a page are of one moment


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


class Look(NamedTuple):
    """What was counted up to a second of time; an engine without counts of decoding has none."""

    at_s: Annotated[float, Field(ge=0, le=2**53)]
    running: Annotated[float, Field(ge=0, le=2**53)]
    tokens: Annotated[float, Field(ge=-(2**53), le=2**53)]
    steps: Annotated[float, Field(ge=-(2**53), le=2**53)]
    seconds: Annotated[float, Field(ge=0, le=2**53)]


@dataclass(frozen=True, eq=False)
class Pace:
    """Decoding at one number of running requests: (tokens, steps, seconds) of every block, a row each."""

    blocks: Floats

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
    """The engine whose names a page has.

    >>> engine_of("llamacpp:requests_processing 1"), engine_of("up 1")
    ('llama-cpp', None)
    """
    return next((name for name, names in ENGINES.items() if is_exposition(text, names.needed)), None)


def counts_of(text: str, engine: str, source: object) -> dict[Series, float]:
    """What is needed of a page; InvalidInput where it is none of the engine's, too much, or no counts."""
    counts = series_of(text, source, ENGINES[engine].needed)
    if not 0 < len(counts) <= MOST_COUNTS or any(not 0 <= value <= MOST_DRAFTS for value in counts.values()):
        raise InvalidInput(
            f"{source} must show up to {MOST_COUNTS} counts of {engine} from 0 to {MOST_DRAFTS} all the time, but shows others."
        )
    return counts


@dataclass
class Recording:
    """What was seen of a server since its last restart.

    before, after : the lines of the first look and of the last
    restarted     : whether something was seen before that is left out
    """

    server: str
    model: str
    engine: Literal["vllm", "llama-cpp", "sglang", "tensorrt-llm"]
    before: str = ""
    after: str = ""
    looks: list[Look] = field(default_factory=list)
    restarted: bool = False

    @classmethod
    def load(cls, path: Path) -> Recording:
        """The recording of a file; InvalidInput where it is none."""
        recording = typed(cls, read_json(path, KIND), path)
        for text in (recording.before, recording.after):
            counts_of(text, recording.engine, path)
        if not recording.looks:
            raise InvalidInput(f"{path} must hold looks at a server, but holds none.")
        return recording

    def save(self, path: Path) -> None:
        write_json(path, KIND, document(self))

    def check_same(self, other: Recording, path: Path) -> None:
        """Raise InvalidInput where another recording is of another server than this one, which is in a file."""
        if (other.server, other.model, other.engine) != (self.server, self.model, self.engine):
            raise InvalidInput(
                f"{path} is of {self.model} in {self.engine} at {self.server}, which {other.model} in {other.engine} at "
                f"{other.server} replaces only with `overwrite`: pass that, or another `run`."
            )

    def add(self, page: str) -> None:
        """Add a look at a page of counters."""
        names, counts = ENGINES[self.engine], counts_of(page, self.engine, self.server)
        if self.looks and _has_restarted(counts_of(self.after, self.engine, self.server), counts):
            self.looks, self.restarted = [], True
        lines = (line for line in page.splitlines() if re.match(names.needed, line))
        self.after = "\n".join(lines) + "\n"
        self.before = self.before if self.looks else self.after
        totals = _totals(counts)
        tokens, steps = (
            totals[first] - sum(totals[name] for name in others)
            for first, *others in (names.tokens or ("",), names.steps or ("",))
        )
        steps = steps or tokens  # where no steps are counted every token takes one
        self.looks.append(Look(time.time(), totals[names.running], tokens, steps, totals[names.seconds]))

    @property
    def rises(self) -> Mapping[str, float]:
        """By how much counters rose, all of a name together."""
        before, after = (_totals(counts_of(text, self.engine, self.server)) for text in (self.before, self.after))
        return {name: total - before[name] for name, total in after.items() if name.endswith(COUNTED)}

    @property
    def drafted(self) -> tuple[float, float]:
        """Drafts that were counted, and all of their guesses."""
        drafts, guesses = (self.rises.get(f"{name}_total", 0.0) for name in COUNTERS[:2])
        return drafts, guesses

    @property
    def guesses(self) -> int:
        """Guesses of the longest draft, as far as counters tell."""
        drafts, drafted = self.drafted
        if not drafts:
            return MOST_DEPTH if self.rises.get("spec_verify_calls_total") else 0
        reached = {
            dict(labels).get("position")
            for (name, labels), count in counts_of(self.after, self.engine, self.server).items()
            if count and name == f"{COUNTERS[3]}_total"
        }
        return min(max(ceil(drafted / drafts - UNEVEN), len(reached)), MOST_DEPTH)

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens per step over all steps; None where they are not counted, or counted otherwise than a server decodes."""
        decoded = np.subtract(self.looks[-1], self.looks[0])[2:]
        block = _believed(decoded, self.guesses, round(self.looks[-1].running))
        return None if block is None else float(block[0] / block[1])

    def paces(self) -> tuple[dict[int, Pace], list[str]]:
        """The pace at each number of running requests that stood still between two looks, and what is not believed."""
        names, blocks = ENGINES[self.engine], dict[int, list[Floats]]()
        for old, new in pairwise(self.looks):
            size = round(old.running if names.at_end else (old.running + new.running) / 2)
            # What is counted when a request ends was of those that ran before.
            is_steady = names.at_end or abs(old.running - new.running) <= ALIKE * size
            rise = np.subtract(new, old)
            if not size or not is_steady or not 0 < rise[0] < MOST_BETWEEN_S:
                continue
            mine = blocks.setdefault(size, [])
            if not mine or (mine[-1][0] >= BLOCK_S and mine[-1][2:].min() > 0):
                mine.append(np.zeros(len(rise)))
            mine[-1] += rise
        guesses, paces, unlikely = self.guesses, dict[int, Pace](), 0
        for size in sorted(blocks):
            counted = [block[2:] for block in blocks[size] if block[2:].any()]
            believed = [block for block in (_believed(block, guesses, size) for block in counted) if block is not None]
            unlikely += len(counted) - len(believed)
            if believed:
                paces[size] = Pace(np.array(believed))
        if not unlikely:
            return paces, []
        return paces, [
            f"{self.server} counts what cannot be: a step of up to {guesses} guesses gives 1 to {guesses + 1} tokens. {unlikely} "
            f"stretches of up to {BLOCK_S:.0f} s are left out."
        ]


def _totals(counts: Mapping[Series, float]) -> Mapping[str, float]:
    totals = defaultdict[str, float](float)
    for (name, _), value in counts.items():
        totals[name] += value
    return totals


def _has_restarted(old: Mapping[Series, float], new: Mapping[Series, float]) -> bool:
    fell = any(new.get(series, -1.0) < old[series] for series in old if series[0].endswith(COUNTED))
    created = [series for series in old.keys() & new.keys() if series[0].endswith("_created")]
    return fell or any(new[series] != old[series] for series in created)


def _believed(block: Floats, guesses: int, running: int) -> Floats | None:
    """(tokens, steps, seconds) with tokens that so many steps may give; None where they are far from that."""
    tokens, steps, seconds = block.tolist()
    uneven = UNEVEN * steps + 2 * running
    if min(steps, seconds) <= 0 or not STEP_MS[0] <= 1000 * seconds / steps <= STEP_MS[1]:
        return None
    if not steps - uneven <= tokens <= (guesses + 1) * steps + uneven:
        return None
    return np.array([min(max(tokens, steps), (guesses + 1) * steps), steps, seconds])


async def find_counters(server: Server) -> tuple[str, Recording]:
    """The page that has a server's counters, and a recording with the first look at it, once the server has loaded its model."""
    import anyio

    begin, is_noted = anyio.current_time(), False
    while True:
        try:
            return await _counters_of(server)
        except Loading as error:
            if anyio.current_time() > begin + LOADING_S:
                raise
            if not is_noted:
                note(f"{error} Waiting for it, {LOADING_S:g} s at most.")
            is_noted = True
            await anyio.sleep(EVERY_S)


async def _counters_of(server: Server) -> tuple[str, Recording]:
    for page in PAGES:
        try:
            text = await server.metrics(page)
        except NoSuchPage:
            continue
        if engine := engine_of(text):
            recording = typed(Recording, {"server": server.url, "model": await server.model(), "engine": engine}, page)
            recording.add(text)
            return page, recording
    raise Unsupported(
        f"{server.url} must show the counters of {', '.join(ENGINES)} under {' or '.join(PAGES)}, but does not. Start "
        "llama-server with --metrics, SGLang with --enable-metrics, TensorRT-LLM with return_perf_metrics: true."
    )


async def watch(server: Server, page: str, recording: Recording, failures: list[str]) -> None:
    """Add a look every second until it is cancelled; only GETs. Why one fails is added to ``failures``."""
    import anyio

    while True:
        await anyio.sleep(EVERY_S)
        try:
            recording.add(await server.metrics(page))
        except TreeoptError as error:
            failures.append(str(error))


def over_plain(mine: Sequence[Pace], plain: Sequence[Pace]) -> Estimate:
    """How many times plain's throughput the same requests have, over batch sizes in the shares that they were served.

    The interval is by a bootstrap over blocks of time; None where a batch size has fewer than two of either.
    """
    draws, without, taken = [], 0.0, 0.0
    for i, (pace, other) in enumerate(zip(mine, plain, strict=True)):
        a, b = (conversation_draws(len(one.blocks), seed=2 * i + j) @ one.blocks for j, one in enumerate((pace, other)))
        draws.append(np.stack([a[:, 0] * b[:, 2] / b[:, 0], a[:, 2]]))
        without += pace.sums[0] * other.token_ms / 1000
        taken += pace.sums[2]
    fewest = min(len(pace.blocks) for pace in (*mine, *plain))
    top, low = np.sum(draws, axis=0)
    return Estimate(without / taken, None, *(interval95(top / low, fewest) if fewest > 1 else ()))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Tuned(Displayed):
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
    paces: Mapping[int, Pace]
    plain: Mapping[int, Pace]
    over_plain: Estimate | None = None
    calibration: Calibration | None = None
    command: str | None = None
    unknown: Sequence[str]

    @property
    def survival(self) -> list[float]:
        return [] if self.calibration is None else list(self.calibration.meta["survival"])

    def document(self) -> dict[str, object]:
        figures = ("tokens_per_step", "step_ms", "token_ms")
        sizes = [{"batch_size": n, **{name: getattr(one, name) for name in figures}} for n, one in self.paces.items()]
        plain = [{"batch_size": n, "step_ms": one.step_ms} for n, one in self.plain.items()]
        names = ("engine", "model", "tokens_per_step", "survival", "command", "unknown")
        known = {name: getattr(self, name) for name in names}
        known["over_plain"] = self.over_plain
        return {"schema": schema("tuned"), **document(known), "paces": sizes, "plain": plain}
