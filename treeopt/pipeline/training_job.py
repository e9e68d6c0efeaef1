"""The part of train that may be stopped and continued: count, train, count again, write the heads and what was reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeopt.errors import InvalidInput
from treeopt.files import storage, writing
from treeopt.files.bounds import loads
from treeopt.files.writing import discard
from treeopt.report.terminal import note, progress

if TYPE_CHECKING:
    from treeopt.runtime.target import Target
    from treeopt.runtime.training.batches import Text
    from treeopt.runtime.training.recipe import Recipe

CHECKPOINT = "checkpoint.partial"
BY_HEART = (1.5, 0.1)  # times and more by which accuracy on learned texts exceeds that on others


@dataclass(frozen=True)
class TrainingJob:
    """A training run: heads of a target, the texts that they learn from, and the folder that they go to."""

    folder: Path
    accelerator: Any
    target: Target
    recipe: Recipe
    learned: list[Text]
    held_out: list[Text]
    own: bool

    @property
    def work(self) -> Path:
        return self.folder / "training"

    def run(self) -> tuple[tuple[Path, ...], dict[str, object]]:
        """Count, train, count again, write the heads: their files, and what was reached."""
        from treeopt.runtime.training.heads import save_result
        from treeopt.runtime.training.loop import CHECKPOINT_STEPS, Checkpoints, Loop
        from treeopt.runtime.training.trainees import FrozenStates

        is_main, recipe = self.accelerator.is_main_process, self.recipe
        states, held_states = (FrozenStates(self.target, part) for part in (self.learned, self.held_out))
        trainee = self._trainee(states)
        checkpoints = Checkpoints(self.work / CHECKPOINT, self._key())
        checkpoints.check()
        loop = Loop(
            self.accelerator,
            trainee,
            recipe,
            self.learned,
            states if trainee.needs_states else None,
            checkpoints=checkpoints,
            log=self.work / "log.jsonl",
        )
        counted = held_states if trainee.needs_states else None
        with progress("Counting before", None, is_main):
            before = loop.count(self.held_out, counted)
        begun = loop.resume()
        if begun.step and is_main:
            note(f"Continuing after {begun.step:,} steps.")
        try:
            with progress("Training", 1.0, is_main) as advance:
                shown = 0.0
                for position in loop.run():
                    share = recipe.share(position.step - 1, position.seconds)
                    advance(share - shown)
                    shown = share
            with progress("Counting after", None, is_main):
                after = loop.count(self.held_out, counted)
            if loop.position.step % CHECKPOINT_STEPS:  # else it has just been kept
                loop.checkpoint()
        except KeyboardInterrupt:
            kept = loop.keep()
            if is_main and loop.position.step:
                note(f"Stopped after step {loop.position.step:,}; training goes on after step {kept.step:,}.")
            raise
        files: list[Path] = []
        if is_main:
            with progress("Writing", None, is_main):
                files = save_result(trainee, self.target, recipe, self.folder)
        self.accelerator.wait_for_everyone()
        return tuple(files), {
            "steps": loop.position.step,
            "seconds": round(loop.position.seconds, 3),
            "held_out": {"before": before, "after": after},
        }

    def _trainee(self, states: Any) -> Any:
        from treeopt.runtime.training.heads import make_heads
        from treeopt.runtime.training.trainees import HeadsTrainee

        target, recipe = self.target, self.recipe
        heads = make_heads(target, recipe, self.learned, states.usual_rms)
        if not recipe.defaults.trains_base:
            return HeadsTrainee(heads, recipe, lambda hidden: target.scores(target.logits(hidden)))
        from treeopt.runtime.training.trainees import JointTrainee

        return JointTrainee(heads, recipe, target, own_answers=self.own)

    def _key(self) -> dict[str, object]:
        """All that the weights of a run depend on."""
        from treeopt.runtime.training.batches import digest_of
        from treeopt.runtime.training.texts import weights_digest

        return {
            **self.recipe.record(),
            "texts": digest_of(self.learned),
            "own_answers": self.own,
            "weights": weights_digest(self.target.model),
            "dtype": str(self.target.dtype),
            "mixed_precision": self.accelerator.mixed_precision,
            "processes": self.accelerator.num_processes,
        }

    def write_record(self, record: Mapping[str, Any]) -> None:
        """training.json and the curves of the log; says where heads learned their texts by heart.

        The last step of the run: its checkpoint is deleted when all is written.
        """
        storage.write_json(self.work / "training.json", "training", record)
        file = self.work / "log.jsonl"
        try:
            log = [loads(line) for line in storage.read_text(file).splitlines()]
        except ValueError as error:
            raise InvalidInput(f"The heads are whole, but {file} cannot be read: {error}.") from None
        if said := by_heart(log, record["held_out"]["after"]):
            note(said)
        if log:
            self.draw_curves(log, record)
        discard(self.work / CHECKPOINT)

    def draw_curves(self, log: Sequence[Mapping[str, Any]], record: Mapping[str, Any]) -> None:
        from treeopt.report.figures.accuracy import training_chart
        from treeopt.report.figures.chart import draw
        from treeopt.report.figures.style import to_bytes

        picture = to_bytes(draw(training_chart(log, record)), "png")
        with writing.atomic_writer(self.work / "curves.png") as stream:
            stream.write(picture)


def by_heart(log: Sequence[Mapping[str, Any]], after: Mapping[str, Any]) -> str | None:
    """Says so where heads are right on the texts they learn from far more often than on held-out ones."""
    last = log[-max(1, len(log) // 10) :]
    pairs = [
        (sum(seen) / len(seen), held_out)
        for k, held_out in enumerate(after["accuracy"])
        if held_out is not None and (seen := [a for line in last if (a := line["accuracy"][k]) is not None])
    ]
    if not pairs:
        return None
    learned, held_out = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    ratio, difference = BY_HEART
    if learned <= ratio * held_out or learned <= held_out + difference:
        return None
    return (
        f"At the end the first choice is right in {learned:.2f} of the states of texts that were learned "
        f"from, but in {held_out:.2f} of the states of held-out texts. The heads have memorised the "
        "texts: use more prompts, or train for a shorter time."
    )
