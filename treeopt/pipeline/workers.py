"""Workers of a cluster that do blocks for a command, and how these come into the command's journal.

A worker loads the model once and takes numbers of blocks. Finished blocks come back through Ray, and the command writes them
into its journal. A journal does not tell who made its blocks, so a run that was stopped continues with other workers, or
without any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from treeopt.errors import InvalidInput
from treeopt.files.journal import Journal
from treeopt.files.writing import atomic_writer
from treeopt.report.terminal import note
from treeopt.runtime.cluster import Cluster, DoBlock, Work

if TYPE_CHECKING:
    from treeopt.records.pools import Counts
    from treeopt.runtime.prompts.sets import PromptSet
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


def finish_blocks(
    cluster: Cluster, work: Work, journal: Journal, sizes: Sequence[int], advance: Callable[[float], None]
) -> None:
    """Have all blocks of a journal finished that are not.

    sizes : of every block, by which ``advance`` is called when it is there
    """
    missing = [number for number in range(len(sizes)) if not journal.is_finished(number)]
    if len(missing) < len(sizes):
        note(f"Continuing after {len(sizes) - len(missing)} of {len(sizes)} blocks.")
        advance(sum(sizes) - sum(sizes[number] for number in missing))
    if 0 < len(missing) < cluster.number:
        note(f"Only as many workers are used as blocks are left: {len(missing)} of {cluster.number}.")
    for number, content, notes in cluster.do(work, missing) if missing else ():
        note(*notes)
        with atomic_writer(journal.block(number)) as stream:
            stream.write(content)
        journal.finish(number)
        advance(sizes[number])


def content_of(write: Callable[[Path], object]) -> bytes:
    """The bytes of the file that ``write`` makes."""
    with TemporaryDirectory(prefix="treeopt-") as made:
        file = Path(made) / "block.npz"
        write(file)
        return file.read_bytes()


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
        from treeopt.runtime.measure.ranks import collect_trace
        from treeopt.runtime.memory import with_less_memory
        from treeopt.runtime.session import open_in_worker

        session, rows = open_in_worker(self.source, self.threads, self.prompts), self.batch_size
        setup = session.setup(self.max_new_tokens)

        def block(number: int, say: Callable[[str], None]) -> bytes:
            nonlocal rows
            asked = self.prompts.conversations[number * self.size : (number + 1) * self.size]
            prompts = replace(self.prompts, conversations=asked)
            collect = partial(collect_trace, setup, prompts, counts=self.counts, given=session.given)
            trace, rows = with_less_memory(lambda n: collect(batch_size=n, meta={"batch_size": n}), rows, say)
            return content_of(trace.save)

        return block


@dataclass(frozen=True)
class AnswerBlocks:
    """Blocks of the answers that heads learn from: every worker holds the model.

    loading : options of `treeopt.runtime.training.opening.open_base`
    key     : of the journal, which names the model's number format and weights
    """

    loading: Mapping[str, Any]
    key: Mapping[str, Any]
    prompts: PromptSet
    asking: Asking

    def open(self) -> DoBlock:
        import torch

        from treeopt.runtime.training import opening, texts

        here = SimpleNamespace(device="cuda" if torch.cuda.is_available() else "cpu")
        target, key = opening.open_base(accelerator=here, **self.loading), self.key
        found = {"dtype": str(target.dtype), "weights": texts.weights_digest(target.model)}
        if found != {name: key[name] for name in found}:
            raise InvalidInput(
                "Workers must have the model of the command, but its number format or its weights are others: pass `dtype`, "
                "and the same `model` on all hosts."
            )
        answers = texts.AnswerWriter(target, self.prompts, self.asking)
        return lambda number, say: content_of(lambda file: answers.write(file, number, say))
