"""Train: heads for a model that has none.

Everything that a run makes beside the heads themselves lies in the folder ``training`` beside them: the
answers, checkpoints while it runs, a line for every step (log.jsonl), what was reached (training.json), and
curves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeopt import demo
from treeopt.errors import InvalidInput
from treeopt.files import storage
from treeopt.files.provenance import Provenance
from treeopt.report.terminal import Advance, note, progress

if TYPE_CHECKING:
    from treeopt.runtime.prompts.sets import PromptSet
    from treeopt.runtime.target import Target
    from treeopt.runtime.training.batches import Text
    from treeopt.runtime.training.recipe import Recipe
    from treeopt.runtime.training.texts import Asking

PROMPT_OPTIONS = ("column", "responses", "split", "chat_template")
RULE_OPTIONS = ("acceptance", "temperature", "top_p", "top_k")
WEIGHTS = (".safetensors", ".pt", ".bin")
FEW_HELD_OUT = 10  # texts; fewer cannot tell how good heads are
BY_HEART = (1.5, 0.1)  # times and more by which accuracy on learned texts exceeds that on others


@dataclass(frozen=True)
class Training:
    """Heads that were trained: where they are, what they reach, and how to use them."""

    folder: Path
    files: tuple[Path, ...]
    record: dict[str, Any]
    command: str

    def document(self) -> dict[str, Any]:
        return {**self.record, "files": [str(file) for file in self.files], "command": self.command}


def train(
    folder: Path,
    source: dict[str, Any],
    recipe: Recipe,
    *,
    num_prompts: int,
    max_new_tokens: int,
    tokens: int | None = None,
    answers: Path | None = None,
    mixed_precision: str | None = None,
    load_in_8bit: bool = False,
    checkpoint_steps: int = 100,
) -> Training | None:
    """Train heads into ``folder``; None in all but the first process of several.

    source  : what loads the model and its prompts, and the rule that its answers are written by
    tokens  : longest text, prompt included
    answers : folder to keep the model's own answers in; by default beside the heads
    """
    from treeopt.runtime.training import opening
    from treeopt.runtime.training.batches import split_texts
    from treeopt.runtime.training.heads import size_of_heads

    kind = recipe.kind
    if source.get("acceptance") not in (None, "greedy", "sample"):
        raise InvalidInput(
            "Answers to learn from are written plainly, greedily or with --acceptance sample, but got "
            f"--acceptance {source['acceptance']}: leave it out."
        )
    _check_folder(folder, kind)
    opening.check_packages(kind, load_in_8bit=load_in_8bit)
    model = source.get("model", demo.NAME)
    accelerator = opening.open_accelerator(
        kind, device=source.get("device"), dtype=source.get("dtype"), mixed_precision=mixed_precision
    )
    is_main = accelerator.is_main_process
    loading = {
        name: value
        for name, value in source.items()
        if name not in (*PROMPT_OPTIONS, *RULE_OPTIONS, "model", "prompts", "seed")
    }
    asked = {name: source[name] for name in PROMPT_OPTIONS if name in source}
    with _bar("Loading", None, is_main):
        target = opening.open_base(model, accelerator, load_in_8bit=load_in_8bit, **loading)
        prompts = opening.open_seeds(target, source.get("prompts"), num_prompts, **asked)
    size = size_of_heads(target, recipe)
    if is_main:
        note(f"{kind} heads: {size}")
    own = "responses" not in source
    asking = _asking(target, source, max_new_tokens, tokens)
    texts = _texts(target, prompts, asking, own, answers or folder / "training", accelerator)
    learned, held_out = split_texts(texts)
    _check_heads(recipe.num_heads, learned)
    recipe = recipe.over(len(learned))
    if is_main:
        answered = sum(text.answer_tokens for text in learned)
        few = ", too few to tell how good the heads are: use more prompts" * (len(held_out) < FEW_HELD_OUT)
        note(f"{len(learned):,} texts to learn from, {answered:,} tokens; {len(held_out):,} held out{few}.")
    job = _Job(folder, accelerator, target, recipe, learned, held_out, own, checkpoint_steps)
    record = {
        "recipe": recipe.record(),
        "heads": {"parameters": size.parameters, "bytes": size.total * size.bytes_each},
        "texts": {
            "own_answers": own,
            "max_new_tokens": max_new_tokens,
            "learned": len(learned),
            "held_out": len(held_out),
            "answer_tokens": sum(t.answer_tokens for t in learned),
            "prompt_sha256": [c.sha256 for c in prompts.conversations],
        },
        "provenance": _provenance(target, recipe, prompts, asking if own else None).record(),
    }
    files, reached = job.run()
    if is_main:
        record |= reached
        job.write_record(record)
    accelerator.end_training()
    return Training(folder, files, record, _command(source, model, folder, kind)) if is_main else None


@dataclass(frozen=True)
class _Job:
    """What is trained, on what, and where to."""

    folder: Path
    accelerator: Any
    target: Target
    recipe: Recipe
    learned: list[Text]
    held_out: list[Text]
    own: bool
    checkpoint_steps: int

    @property
    def work(self) -> Path:
        return self.folder / "training"

    def run(self) -> tuple[tuple[Path, ...], dict[str, Any]]:
        """Count, train, count again, write the heads: their files, and what was reached."""
        from treeopt.runtime.training.checkpoint import Checkpoints
        from treeopt.runtime.training.loop import Loop
        from treeopt.runtime.training.saving import save_result
        from treeopt.runtime.training.trainees import FrozenStates

        is_main, recipe = self.accelerator.is_main_process, self.recipe
        states, held_states = (FrozenStates(self.target, part) for part in (self.learned, self.held_out))
        trainee = self._trainee(states)
        checkpoints = Checkpoints(self.work / "checkpoint.partial", self._key())
        checkpoints.check()
        loop = Loop(
            self.accelerator,
            trainee,
            recipe,
            self.learned,
            states if trainee.needs_states else None,
            checkpoints=checkpoints,
            log=self.work / "log.jsonl",
            checkpoint_steps=self.checkpoint_steps,
        )
        counted = held_states if trainee.needs_states else None
        with _bar("Counting before", None, is_main):
            before = loop.count(self.held_out, counted)
        begun = loop.resume()
        if begun.step and is_main:
            note(f"Continuing after {begun.step:,} steps.")
        try:
            with _bar("Training", 1.0, is_main) as advance:
                shown = 0.0
                for position in loop.run():
                    share = recipe.share(position.step - 1, position.seconds)
                    advance(share - shown)
                    shown = share
            with _bar("Counting after", None, is_main):
                after = loop.count(self.held_out, counted)
        except KeyboardInterrupt:
            kept = loop.keep()
            if is_main and loop.position.step:
                note(f"Stopped after step {loop.position.step:,}; training goes on after step {kept.step:,}.")
            raise
        files: list[Path] = []
        if is_main:
            with _bar("Writing", None, is_main):
                files = save_result(trainee, self.target, recipe.kind, self.folder)
            checkpoints.discard()
        self.accelerator.wait_for_everyone()
        return tuple(files), {
            "steps": loop.position.step,
            "seconds": round(loop.position.seconds, 3),
            "held_out": {"before": before.record(), "after": after.record()},
        }

    def _trainee(self, states: Any) -> Any:
        from treeopt.runtime.training.heads import make_heads
        from treeopt.runtime.training.recipe import HYDRA_PLUS, MEDUSA_2
        from treeopt.runtime.training.trainees import HeadsTrainee

        target, recipe = self.target, self.recipe
        rms = states.usual_rms() if recipe.kind == HYDRA_PLUS else 1.0
        heads = make_heads(target, recipe, hidden_rms=rms)
        if recipe.kind != MEDUSA_2:
            return HeadsTrainee(heads, recipe, lambda hidden: target.scores(target.logits(hidden)))
        from treeopt.runtime.training.medusa2 import JointTrainee

        return JointTrainee(heads, recipe, target, own_answers=self.own)

    def _key(self) -> dict[str, Any]:
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

    def write_record(self, record: dict[str, Any]) -> None:
        """training.json and the curves of the log; says where heads learned their texts by heart."""
        from treeopt.report.figures.style import to_bytes
        from treeopt.report.figures.training import draw_training, training_caption, training_data

        storage.write_json(self.work / "training.json", "training", record)
        log = [json.loads(line) for line in storage.read_text(self.work / "log.jsonl").splitlines()]
        if said := _by_heart(log, record["held_out"]["after"]):
            note(said)
        if log:
            data = training_data(log, record["held_out"], caption=training_caption(record))
            with storage.atomic_writer(self.work / "curves.png") as stream:
                stream.write(to_bytes(draw_training(data), "png"))


def _check_folder(folder: Path, kind: str) -> None:
    """Raise InvalidInput, before anything is trained, where other weights lie in the folder."""
    if folder.exists() and not folder.is_dir():
        raise InvalidInput(f"--output must be a folder, but {folder} is a file.")
    strange = sorted(file.name for file in folder.glob("*") if file.name.endswith(WEIGHTS))
    if not strange:
        return
    made = folder / "training" / "training.json"
    before = storage.read_json(made, "training", ("recipe",))["recipe"]["kind"] if made.exists() else None
    if before != kind:
        raise InvalidInput(
            f"--output must be a folder without other weights, but {folder} has {strange[0]}: pass a new one."
        )


def _check_heads(num_heads: int, learned: Sequence[Text]) -> None:
    """Raise InvalidInput where no text is long enough to teach the last head anything."""
    longest = max(text.answer_tokens for text in learned)
    if num_heads >= longest:
        raise InvalidInput(
            f"--heads must be below {longest}, the tokens of the longest answer to learn from, but got {num_heads}: "
            "lower it, or learn from longer answers (--max-new-tokens)."
        )


def _by_heart(log: Sequence[Mapping[str, Any]], after: Mapping[str, Any]) -> str | None:
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
        f"At the end first choices are right in {learned:.2f} of the states of texts learned from, but in "
        f"{held_out:.2f} of held-out ones: the heads know these texts by heart. Use more prompts, or train for less long."
    )


def _asking(target: Target, source: dict[str, Any], max_new_tokens: int, tokens: int | None) -> Asking:
    from treeopt.runtime.acceptance.open import open_acceptance
    from treeopt.runtime.stop import StopRule
    from treeopt.runtime.training.texts import Asking

    rule = {name: source[name] for name in RULE_OPTIONS if name in source}
    if rule and "responses" in source:
        raise InvalidInput(
            f"--{next(iter(rule)).replace('_', '-')} says how the model writes its answers, but --responses "
            "are given: leave one out."
        )
    name = rule.pop("acceptance", "sample" if rule else "greedy")
    if name == "sample" and "seed" in source:
        rule["seed"] = source["seed"]
    acceptance = open_acceptance(name, rule.pop("temperature", None), **rule)
    stop, context = StopRule(target.eos_ids, max_new_tokens), target.context
    return Asking(stop, acceptance, min(tokens or context, context))


def _texts(target: Target, prompts: PromptSet, asking: Asking, own: bool, folder: Path, accelerator: Any) -> list[Text]:
    from treeopt.runtime.training.texts import Worker, given_texts, own_texts

    if not own:
        return given_texts(target, prompts, asking)
    worker = Worker(accelerator.process_index, accelerator.num_processes, accelerator.wait_for_everyone)
    with _bar("Answering", len(prompts.conversations), accelerator.is_main_process) as advance:
        return own_texts(target, prompts, folder, asking, worker=worker, advance=advance, say=note)


def _provenance(target: Target, recipe: Recipe, prompts: PromptSet, asking: Asking | None) -> Provenance:
    return Provenance(
        model=target.name,
        revision=target.revision,
        drafter={"kind": recipe.kind, "num_heads": recipe.num_heads, "num_layers": recipe.layers},
        dataset=prompts.name,
        dataset_fingerprint=prompts.fingerprint,
        acceptance=asking.acceptance.record if asking else None,
        device=str(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        seed=recipe.seed,
    )


def _command(source: dict[str, Any], model: str, folder: Path, kind: str) -> str:
    """The line that uses the result."""
    others = demo.NAME if "prompts" not in source else "OTHER_PROMPTS"
    if kind == "medusa-2":
        return f"treeopt run --model {folder} --prompts {others}"
    if model == demo.NAME:
        return f"treeopt run --drafter {folder}"
    return f"treeopt run --model {model} --drafter {folder} --prompts {others}"


@contextmanager
def _bar(title: str, total: float | None, is_main: bool) -> Iterator[Advance]:
    """A progress bar of the first process."""
    if not is_main:
        yield lambda amount: None
        return
    with progress(title, total) as advance:
        yield advance
