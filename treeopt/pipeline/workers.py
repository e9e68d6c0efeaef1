"""The blocks of a command, which are made here or by the workers of a cluster.

A worker loads the model once and takes numbers of blocks. Finished blocks come back through Ray, and the command writes them
into its journal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

from treeopt.errors import InvalidInput
from treeopt.files import npz
from treeopt.files.journal import Advance, Journal, Say
from treeopt.runtime.cluster import Cluster, DoBlock

if TYPE_CHECKING:
    from treeopt.records.pools import Counts
    from treeopt.records.trace import RankTrace
    from treeopt.runtime.prompts.sets import PromptSet
    from treeopt.runtime.session import Session
    from treeopt.runtime.training.texts import Asking


@contextmanager
def cluster_of(engine: str | None, **options: Any) -> Iterator[Cluster | None]:
    """The workers that --engine, --workers, --gpus-per-worker and --address ask for; None without --engine."""
    given = {name: value for name, value in options.items() if value is not None}
    if engine is None:
        if given:
            raise InvalidInput(f"`{next(iter(given))}` says how `engine=ray` works: add that, or leave it out.")
        yield None
        return
    if engine != "ray":
        raise InvalidInput(f"`engine` must be ray here, but got {engine!r}.")
    number, gpus = given.get("workers", 1), given.get("gpus_per_worker", 0)
    if number < 1 or not 0 <= gpus < inf or (gpus > 1 and gpus % 1):
        said = "`workers` must be at least 1, and `gpus_per_worker` a share of one or a whole number"
        raise InvalidInput(f"{said}, but got {number} and {gpus}.")
    with Cluster(number, gpus, given.get("address")) as cluster:
        yield cluster


@dataclass(frozen=True)
class RankBlocks:
    """Blocks of a calibration: every worker holds target and drafter.

    size : conversations of a block
    """

    source: Mapping[str, Any]
    threads: int
    prompts: PromptSet
    size: int
    max_new_tokens: int
    batch_size: int
    counts: Counts

    def open(self) -> DoBlock:
        from treeopt.runtime.session import open_in_worker

        return self.by(open_in_worker(self.source, self.threads, self.prompts))

    def by(self, session: Session, unfinished: Journal | None = None, advance: Advance = lambda done: None) -> DoBlock:
        """What makes blocks with a session that is loaded here.

        unfinished : the journal of the blocks, beside which a block that is not finished is kept
        """
        from treeopt.runtime.measure.ranks import collect_trace
        from treeopt.runtime.measure.unfinished import Unfinished
        from treeopt.runtime.memory import with_less_memory

        rows, setup = self.batch_size, session.setup(self.max_new_tokens)

        def block(number: int, say: Say) -> bytes:
            nonlocal rows
            asked = self.prompts.conversations[number * self.size : (number + 1) * self.size]

            def attempt(n: int) -> RankTrace:
                told: dict[str, Any] = {"batch_size": n, "meta": {"batch_size": n}, "progress": advance}
                if unfinished is not None:
                    key = {**unfinished.key, "block": number, "rows": n}
                    told["unfinished"] = Unfinished(unfinished.folder / "unfinished", key, say)
                prompts = replace(self.prompts, conversations=asked)
                return collect_trace(setup, prompts, counts=self.counts, given=session.given, **told)

            trace, rows = with_less_memory(attempt, rows, say)
            return npz.packed(trace.save)

        return block


@dataclass(frozen=True)
class AnswerBlocks:
    """Blocks of the answers that heads learn from: every worker holds the model.

    source : options of the model, see `treeopt.runtime.training.opening.open_base`
    key    : of the journal, which names the model's number format and weights
    """

    source: Mapping[str, Any]
    load_in_8bit: bool
    key: Mapping[str, Any]
    prompts: PromptSet
    asking: Asking

    def open(self) -> DoBlock:
        import torch

        from treeopt.runtime.training import opening, texts

        device, key = "cuda" if torch.cuda.is_available() else "cpu", self.key
        target = opening.open_base(self.source, device, load_in_8bit=self.load_in_8bit)
        found = {"dtype": str(target.dtype), "weights": texts.weights_digest(target.model)}
        if found != {name: key[name] for name in found}:
            raise InvalidInput(
                "Workers must have the model of the command, but its number format or its weights are others: pass `dtype`, "
                "and the same `model` on all hosts."
            )
        answers = texts.AnswerWriter(target, self.prompts, self.asking)
        return answers.block
