"""What workers of a cluster do for a command, and how their finished blocks come into the command's journal.

A worker loads the model once and takes numbers of blocks. It writes each finished block into the journal itself, as the
command alone would, or sends it to the URL of --journal, from where the command fetches it. A journal does not tell who wrote
its blocks, so a run that was stopped continues with other workers, or without any.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from treeopt.errors import InvalidInput
from treeopt.files import storage
from treeopt.files.journal import Journal
from treeopt.files.remote import Mirror, opened
from treeopt.files.writing import sole_writer
from treeopt.report.terminal import note
from treeopt.runtime.cluster import Block, Cluster, Work, Workers

if TYPE_CHECKING:
    from treeopt.records.pools import Counts
    from treeopt.runtime.prompts.sets import PromptSet
    from treeopt.runtime.training.texts import Asking

ENGINE = "ray"
SEEN_S = 60  # that a shared disk takes at most to show a block that another host wrote


@contextmanager
def cluster_of(engine: str | None, **options: Any) -> Iterator[Cluster | None]:
    """The workers that --engine, --workers, --gpus-per-worker, --address and --journal ask for; None without --engine."""
    given = {name: value for name, value in options.items() if value is not None}
    if engine is None:
        if given:
            raise InvalidInput(
                f"--{next(iter(given)).replace('_', '-')} says how --engine ray works: add that, or leave it out."
            )
        yield None
        return
    if engine != ENGINE:
        raise InvalidInput(f"--engine must be {ENGINE} here, but got {engine!r}.")
    number, gpus = given.get("workers", 1), given.get("gpus_per_worker", 0)
    if number < 1 or not 0 <= gpus < float("inf") or (gpus > 1 and gpus % 1):
        raise InvalidInput(
            f"--workers must be at least 1, and --gpus-per-worker a share of one or a whole number, but got {number} and {gpus}."
        )
    if (journal := given.get("journal")) is not None:
        opened(journal)
    with Cluster(Workers(number, gpus, given.get("address"), journal)) as cluster:
        yield cluster


@dataclass(frozen=True)
class Place:
    """The journal of a command, as its workers find it, with whole paths.

    home : the folder whose only writer the command is
    url  : where blocks are sent instead; None where the folder is written
    """

    home: Path
    folder: Path
    key: Mapping[str, Any]
    url: str | None = None

    def journal(self) -> Journal:
        return Journal(self.folder, self.key, ".npz")

    def keep(self, number: int, write: Callable[[Path], object]) -> None:
        """Write a block, on a worker."""
        if self.url is not None:
            with TemporaryDirectory(prefix="treeopt-") as made:
                journal = replace(self, folder=Path(made) / "journal").journal()
                write(journal.block(number))
                journal.finish(number)
                Mirror(self.url, self.key).send(journal, number)
            return
        try:
            known = storage.load_json(self.folder / "key.json")
        except InvalidInput:
            known = None
        if known != json.loads(storage.to_json(self.key)):  # a journal would begin anew here, and delete what is there
            raise InvalidInput(
                f"Without --journal URL all hosts must share the disk of the run, but {self.folder} is not that of the command "
                "here: pass one, s3://BUCKET/FOLDER for example, or a --run on a shared disk."
            )
        with sole_writer(self.home, tuple, "", lock=False):
            journal = self.journal()
            write(journal.block(number))
            journal.finish(number)


def finish_blocks(
    cluster: Cluster, work: Work, place: Place, sizes: Sequence[int], advance: Callable[[float], None]
) -> None:
    """Have all blocks of a journal finished that are not.

    sizes : of every block, by which ``advance`` is called when it is there
    """
    journal = place.journal()
    mirror = Mirror(place.url, place.key) if place.url is not None else None
    if mirror is not None:
        mirror.take()
        for number in mirror.finished() & set(range(len(sizes))):
            if not journal.is_finished(number):
                mirror.fetch(journal, number)
    missing = [number for number in range(len(sizes)) if not journal.is_finished(number)]
    if len(missing) < len(sizes):
        note(f"Continuing after {len(sizes) - len(missing)} of {len(sizes)} blocks.")
        advance(sum(sizes) - sum(sizes[number] for number in missing))
    if 0 < len(missing) < cluster.workers.number:
        note(f"Only as many workers are used as blocks are left: {len(missing)} of {cluster.workers.number}.")
    for number, notes in cluster.do(work, missing) if missing else ():
        for said in notes:
            note(said)
        if mirror is not None:
            mirror.check()
        if not _arrived(journal, mirror, number):
            raise InvalidInput(
                f"A worker wrote {journal.block(number)}, but here it is not to be seen as it was written: pass --journal URL, "
                "or a --run on a disk that all hosts share."
            )
        advance(sizes[number])
    if mirror is not None:
        mirror.remove()


def _arrived(journal: Journal, mirror: Mirror | None, number: int) -> bool:
    """Whether a finished block is in the journal; a shared disk may show it late."""
    if mirror is not None:
        return mirror.fetch(journal, number)
    until = time.monotonic() + SEEN_S
    while not journal.is_finished(number):
        if time.monotonic() > until:
            return False
        os.scandir(journal.folder).close()  # network disks look again
        time.sleep(1)
    return True


@dataclass(frozen=True)
class RankBlocks:
    """Blocks of a calibration: every worker holds target and drafter.

    size : conversations of a block
    """

    place: Place
    source: dict[str, Any]
    threads: int
    prompts: PromptSet
    size: int
    max_new_tokens: int
    batch_size: int
    counts: Counts

    def open(self) -> Block:
        from treeopt.runtime.measure.ranks import collect_trace
        from treeopt.runtime.memory import with_less_memory
        from treeopt.runtime.outline import open_in_worker

        session, rows = open_in_worker(self.source, self.threads, self.prompts), self.batch_size
        setup = session.setup(self.max_new_tokens)

        def block(number: int, say: Callable[[str], None]) -> None:
            nonlocal rows
            asked = self.prompts.conversations[number * self.size : (number + 1) * self.size]
            prompts = replace(self.prompts, conversations=asked)
            trace, rows = with_less_memory(
                lambda n: collect_trace(
                    setup, prompts, batch_size=n, counts=self.counts, given=session.given, meta={"batch_size": n}
                ),
                rows,
                say,
            )
            self.place.keep(number, trace.save)

        return block


@dataclass(frozen=True)
class AnswerBlocks:
    """Blocks of the answers that heads learn from: every worker holds the model.

    loading : options of `treeopt.runtime.training.opening.open_base`
    """

    place: Place
    loading: dict[str, Any]
    prompts: PromptSet
    asking: Asking

    def open(self) -> Block:
        import torch

        from treeopt.runtime.training import opening, texts

        here = SimpleNamespace(device="cuda" if torch.cuda.is_available() else "cpu")
        target, key = opening.open_base(accelerator=here, **self.loading), self.place.key
        found = {"dtype": str(target.dtype), "weights": texts.weights_digest(target.model)}
        if found != {name: key[name] for name in found}:
            raise InvalidInput(
                f"Workers must have the model of the command, but it is in {key['dtype']} there, in {found['dtype']} here, or "
                "has other weights: pass --dtype, and the same --model on all hosts."
            )
        answers = texts.Answers(target, self.prompts, self.asking)
        return lambda number, say: self.place.keep(number, lambda file: answers.write(file, number, say))
