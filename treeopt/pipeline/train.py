"""Train: heads for a model that has none.

Everything that a run makes beside the heads themselves lies in the folder ``training`` beside them: the
answers, checkpoints while it runs, a line for every step (log.jsonl), and what was reached (training.json).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeopt import demo
from treeopt.errors import InvalidInput
from treeopt.files import storage, writing
from treeopt.files.notes import note
from treeopt.files.shell import command_line
from treeopt.pipeline.session import located_source
from treeopt.records.options import Source, TrainOptions, Workers
from treeopt.records.origins import Provenance
from treeopt.report.terminal import progress
from treeopt.runtime.cluster import cluster_of
from treeopt.runtime.waiting import import_torch

if TYPE_CHECKING:
    from treeopt.runtime.cluster import Cluster, DoBlock
    from treeopt.runtime.prompts.sets import PromptSet
    from treeopt.runtime.session import Session
    from treeopt.runtime.training.batches import Text
    from treeopt.runtime.training.opening import Asking
    from treeopt.runtime.training.recipe import Recipe

FEW_HELD_OUT = 10  # texts; fewer cannot tell how good heads are
CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class Training:
    """Heads that were trained: where they are, what they reach, and how to use them."""

    folder: Path
    files: tuple[Path, ...]
    record: dict[str, object]
    command: str

    def document(self) -> dict[str, object]:
        return {**self.record, "files": [str(file) for file in self.files], "command": self.command}


def train(folder: Path, source: Source | Session, recipe: Recipe, wanted: TrainOptions, workers: Workers) -> Training:
    """Train heads into ``folder``.

    source  : what loads the model and its prompts, and the rule that its answers are written by
    workers : who write the answers, where some are asked for
    """
    import_torch()
    if not isinstance(source, Source):
        raise InvalidInput("Training loads a model itself: pass its name instead of a session.")
    if source.responses and (workers.workers is not None or source.rule):
        option = "`rule` says how the model writes its" if source.rule else "`workers` have the model's own"
        raise InvalidInput(f"{option} answers, but `responses` are given: leave one out.")
    if source.acceptance.name not in ("greedy", "sample"):
        raise InvalidInput(
            "The model writes answers to learn from greedily or with `rule=sample`, but got "
            f"`rule={source.rule}`: leave it out."
        )
    if source.seed is not None:
        recipe = replace(recipe, seed=source.seed)
    _check_folder(folder, recipe.kind)
    with cluster_of(workers) as cluster, writing_heads(folder, wanted.answers):
        job = TrainingJob(folder, located_source(source), recipe, wanted.mixed_precision)
        job.write_texts(wanted, cluster)
        files, reached = job.run()
        record = {**job.record(), **reached}
        job.write_record(record)
        return Training(folder, files, record, _command(source, folder))


@contextmanager
def writing_heads(folder: Path, answers: Path | None) -> Iterator[None]:
    """Be the only writer of a folder of heads."""
    own = [place for place in (folder / "training", answers) if place is not None]
    parts = (part for place in own for part in place.glob("answers-*/"))
    refusal = (
        f"A folder of heads has one writer at a time, but another treeopt is writing to {folder}: wait for it, or pass "
        "another `output`."
    )
    try:
        with writing.sole_writer(folder / "training", chain([folder, *own], parts), refusal):
            yield
    finally:
        with suppress(OSError):
            folder.rmdir()  # where nothing was written


def _check_folder(folder: Path, kind: str) -> None:
    """Raise InvalidInput, before anything is trained, where other weights lie in the folder."""
    from treeopt.runtime.checkpoints.save import check_folder

    made = folder / "training" / "training.json"
    recipe = storage.read_json(made, "training").get("recipe") if made.exists() else None
    is_same = isinstance(recipe, dict) and recipe.get("kind") == kind
    if not is_same and not (folder / "training" / CHECKPOINT).exists():  # else it was killed while it wrote the heads
        check_folder(folder)


class TrainingJob:
    """A training run: a target, the recipe of its heads, the texts that they learn from, and the folder that they go to.

    What comes behind the texts may be stopped and continued.
    """

    learned: list[Text]
    held_out: list[Text]
    asking: Asking

    def __init__(self, folder: Path, source: Source, recipe: Recipe, mixed_precision: str | None) -> None:
        from treeopt.runtime.session import open_model
        from treeopt.runtime.training.opening import wanted_precision

        self.folder, self.work, self.recipe = folder, folder / "training", recipe
        self.source, self.own = source, source.responses is None
        with progress("Loading", None):
            self.target = open_model(source)
        self.precision = wanted_precision(mixed_precision, self.target)

    def write_texts(self, wanted: TrainOptions, cluster: Cluster | None) -> None:
        """Find the texts to learn from, the model's own answers or given ones; those of the heads that none can teach are refused."""
        from treeopt.runtime.training import batches, opening

        self.prompts = opening.open_seeds(self.source, self.target, wanted.num_prompts)
        self.asking = self._asking(wanted)
        if not self.own:
            found = opening.given_texts(self.target, self.prompts, self.asking)
        else:
            kept, question = (wanted.answers or self.work).absolute(), (self.target, self.prompts, self.asking)
            if cluster is not None:
                cluster.start()
            with progress("Answering", len(self.prompts.conversations)) as advance:
                elsewhere = None
                if cluster is not None:
                    work = AnswerBlocks(self.source, opening.answers_key(*question), self.prompts, self.asking)
                    elsewhere = partial(cluster.do, work, note)
                found = opening.own_texts(
                    self.target, self.prompts, kept, self.asking, advance=advance, say=note, elsewhere=elsewhere
                )
        self.learned, self.held_out = batches.split_texts(found)
        longest = max(text.answer_tokens for text in self.learned)
        if self.recipe.num_heads >= longest:
            raise InvalidInput(
                f"`num_heads` must be below {longest}, the tokens of the longest answer to learn from, but got "
                f"{self.recipe.num_heads}: lower it, or learn from longer answers (`max_new_tokens`)."
            )
        self.answered = sum(text.answer_tokens for text in self.learned)
        few = ", too few to tell how good the heads are: use more prompts" * (len(self.held_out) < FEW_HELD_OUT)
        note(
            f"{len(self.learned):,} texts to learn from, {self.answered:,} tokens; {len(self.held_out):,} held out{few}."
        )
        self.recipe = self.recipe.over(len(self.learned))

    def _asking(self, wanted: TrainOptions) -> Asking:
        from treeopt.runtime.session import open_rule
        from treeopt.runtime.stop import StopRule
        from treeopt.runtime.training.opening import Asking

        stop, context = StopRule(self.target.eos_ids, wanted.max_new_tokens), self.target.context
        return Asking(stop, open_rule(self.source), min(wanted.tokens or context, context))

    def run(self) -> tuple[tuple[Path, ...], dict[str, object]]:
        """Count, train, count again, write the heads: their files, and what was reached."""
        from treeopt.runtime.training.loop import Checkpoint, Loop
        from treeopt.runtime.training.opening import make_heads, save_result

        heads = make_heads(self.target, self.recipe, self.learned)
        checkpoint = Checkpoint(self.work / CHECKPOINT, self._key())
        checkpoint.read()  # that of another run is refused before anything is counted
        given, log = (heads, self.target, self.recipe, self.learned), self.work / "log.jsonl"
        loop = Loop(*given, checkpoint=checkpoint, log=log, precision=self.precision)
        with progress("Counting before", None):
            before = loop.count(self.held_out)
        if begun := loop.resume().step:
            note(f"Continuing after {begun:,} steps.")
        try:
            with progress("Training", 1.0) as advance:
                shown = 0.0
                for position in loop.run():
                    share = self.recipe.share(position.step - 1, position.seconds)
                    advance(share - shown)
                    shown = share
            with progress("Counting after", None):
                after = loop.count(self.held_out)
            loop.keep()
        except KeyboardInterrupt:
            loop.keep()
            if done := loop.position.step:
                note(f"Stopped after step {done:,}: the same command goes on there.")
            raise
        with progress("Writing", None):
            files = save_result(heads, self.target, self.recipe, self.folder)
        seconds, held_out = round(loop.position.seconds, 3), {"before": before, "after": after}
        return tuple(files), {"steps": loop.position.step, "seconds": seconds, "held_out": held_out}

    def _key(self) -> dict[str, object]:
        from treeopt.runtime.training.batches import digest_of
        from treeopt.runtime.training.opening import weights_digest

        return {
            **self.recipe.record(),
            "texts": digest_of(self.learned),
            "own_answers": self.own,
            "weights": weights_digest(self.target.model),
            "dtype": str(self.target.dtype),
            "mixed_precision": self.precision,
        }

    def record(self) -> dict[str, object]:
        """Recipe, heads, texts and provenance, for files."""
        recipe, target = self.recipe, self.target
        made = replace(
            Provenance.here(),
            model=target.name,
            revision=target.revision,
            drafter={"kind": recipe.kind, "num_heads": recipe.num_heads, "num_layers": recipe.layers},
            dataset=self.prompts.name,
            dataset_fingerprint=self.prompts.fingerprint,
            acceptance=self.asking.acceptance.record if self.own else None,
            device=str(target.device),
            dtype=str(target.dtype).removeprefix("torch."),
            seed=recipe.seed,
        )
        texts = {
            "own_answers": self.own,
            "max_new_tokens": self.asking.stop.max_new_tokens,
            "learned": len(self.learned),
            "held_out": len(self.held_out),
            "answer_tokens": self.answered,
            "prompt_sha256": [conversation.sha256 for conversation in self.prompts.conversations],
        }
        return {"recipe": recipe.record(), "texts": texts, "provenance": made.record}

    def write_record(self, record: Mapping[str, Any]) -> None:
        """training.json, and then the end of the checkpoint."""
        storage.write_json(self.work / "training.json", "training", record)
        (self.work / CHECKPOINT).unlink(missing_ok=True)


@dataclass(frozen=True)
class AnswerBlocks:
    """Blocks of the answers that heads learn from: every worker holds the model.

    source : options of the model
    key    : of the journal, which names the model's number format and weights
    """

    source: Source
    key: Mapping[str, Any]
    prompts: PromptSet
    asking: Asking

    def open(self) -> DoBlock:
        from treeopt.runtime.session import open_model
        from treeopt.runtime.training import opening

        key, target = self.key, open_model(self.source)
        found = {"dtype": str(target.dtype), "weights": opening.weights_digest(target.model)}
        if found != {name: key[name] for name in found}:
            raise InvalidInput(
                "Workers must have the model of the command, but its number format or its weights are others: pass `dtype`, "
                "and the same `model` on all hosts."
            )
        answers = opening.AnswerWriter(target, self.prompts, self.asking)
        return answers.block


def _command(source: Source, folder: Path) -> str:
    model = source.model or demo.NAME
    if model == demo.NAME:
        return command_line("treeopt", "run", "--drafter", folder)
    return command_line("treeopt", "run", "--model", model, "--drafter", folder, "--prompts", "OTHER_PROMPTS")
