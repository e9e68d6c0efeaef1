"""Train: heads for a model that has none.

Everything that a run makes beside the heads themselves lies in the folder ``training`` beside them: the
answers, checkpoints while it runs, a line for every step (log.jsonl), what was reached (training.json), and
curves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeopt import demo
from treeopt.errors import InvalidInput
from treeopt.files import storage
from treeopt.files.provenance import Provenance
from treeopt.files.shell import command_line
from treeopt.files.writing import sole_writer
from treeopt.pipeline.session import located_source
from treeopt.pipeline.training_job import CHECKPOINT, TrainingJob
from treeopt.pipeline.workers import AnswerBlocks, Place, finish_blocks
from treeopt.report.terminal import note, progress

if TYPE_CHECKING:
    from treeopt.runtime.cluster import Cluster
    from treeopt.runtime.prompts.sets import PromptSet
    from treeopt.runtime.target import Target
    from treeopt.runtime.training.batches import Text
    from treeopt.runtime.training.recipe import Recipe
    from treeopt.runtime.training.texts import Asking, Elsewhere

PROMPT_OPTIONS = ("column", "responses", "split", "chat_template")
RULE_OPTIONS = ("acceptance", "temperature", "top_p", "top_k")
WEIGHTS = (".safetensors", ".pt", ".bin")
FEW_HELD_OUT = 10  # texts; fewer cannot tell how good heads are


@dataclass(frozen=True)
class Training:
    """Heads that were trained: where they are, what they reach, and how to use them."""

    folder: Path
    files: tuple[Path, ...]
    record: dict[str, Any]
    command: str

    def document(self) -> dict[str, Any]:
        return {**self.record, "files": [str(file) for file in self.files], "command": self.command}


@dataclass(frozen=True)
class TextOptions:
    """The texts to learn from.

    tokens  : longest text, prompt included; the model's context by default
    answers : folder to keep the model's own answers in; by default beside the heads
    """

    num_prompts: int
    max_new_tokens: int
    tokens: int | None = None
    answers: Path | None = None


def train(
    folder: Path,
    source: dict[str, Any],
    recipe: Recipe,
    wanted: TextOptions,
    *,
    mixed_precision: str | None = None,
    load_in_8bit: bool = False,
    cluster: Cluster | None = None,
) -> Training | None:
    """Train heads into ``folder``; None in all but the first process of several.

    source  : what loads the model and its prompts, and the rule that its answers are written by
    cluster : whose workers write the answers
    """
    if cluster is not None and "responses" in source:
        raise InvalidInput(
            "--engine ray has the model's own answers written, but --responses are given: leave one out."
        )
    from treeopt.runtime.training import opening

    if source.get("acceptance") not in (None, "greedy", "sample"):
        raise InvalidInput(
            "The model writes answers to learn from greedily or with --acceptance sample, but got "
            f"--acceptance {source['acceptance']}: leave it out."
        )
    _check_folder(folder, recipe.kind)
    opening.check_packages(recipe.kind, load_in_8bit=load_in_8bit)
    accelerator = opening.open_accelerator(
        recipe.kind, device=source.get("device"), dtype=source.get("dtype"), mixed_precision=mixed_precision
    )
    with writing_heads(folder, wanted.answers, lock=accelerator.is_main_process):
        return _train(folder, source, recipe, wanted, accelerator, load_in_8bit=load_in_8bit, cluster=cluster)


def _train(
    folder: Path,
    source: dict[str, Any],
    recipe: Recipe,
    wanted: TextOptions,
    accelerator: Any,
    *,
    load_in_8bit: bool,
    cluster: Cluster | None,
) -> Training | None:
    """The same, as the only writer of the folder."""
    from treeopt.runtime.training.batches import split_texts
    from treeopt.runtime.training.heads import size_of_heads

    is_main = accelerator.is_main_process
    located = located_source(source)
    loading = {**_loading(located), "load_in_8bit": load_in_8bit}
    target, prompts = _open(located, loading, accelerator, wanted.num_prompts)
    if is_main:
        note(f"{recipe.kind} heads: {size_of_heads(target, recipe)}")
    own = "responses" not in source
    asking = _asking(target, source, wanted)
    kept = (wanted.answers or folder / "training").absolute()
    by_workers = _by_workers(cluster, folder, loading, prompts, asking) if cluster is not None else None
    texts = _texts(target, prompts, asking, own, kept, accelerator, by_workers)
    learned, held_out = split_texts(texts)
    _check_heads(recipe.num_heads, learned)
    if is_main:
        answered = sum(text.answer_tokens for text in learned)
        few = ", too few to tell how good the heads are: use more prompts" * (len(held_out) < FEW_HELD_OUT)
        note(f"{len(learned):,} texts to learn from, {answered:,} tokens; {len(held_out):,} held out{few}.")
    job = TrainingJob(folder, accelerator, target, recipe.over(len(learned)), learned, held_out, own)
    record = _record(job, prompts, asking)
    files, reached = job.run()
    if is_main:
        record |= reached
        job.write_record(record)
    accelerator.end_training()
    return Training(folder, files, record, _command(source, folder, recipe.kind)) if is_main else None


@contextmanager
def writing_heads(folder: Path, answers: Path | None, *, lock: bool) -> Iterator[None]:
    """Be the only writer of a folder of heads, though of several processes."""

    def places() -> Iterator[Path]:
        yield folder
        for place in (folder / "training", answers):
            if place is not None:
                yield from (place, *place.glob("*.partial/**"), *place.glob("answers-*/"))

    refusal = (
        f"A folder of heads has one writer at a time, but another treeopt is writing to {folder}: wait for it, or pass "
        "another --output."
    )
    try:
        with sole_writer(folder / "training", places, refusal, lock=lock):
            yield
    finally:
        with suppress(OSError):
            folder.rmdir()  # where nothing was written


def _loading(source: dict[str, Any]) -> dict[str, Any]:
    """The options that load the base."""
    other = (*PROMPT_OPTIONS, *RULE_OPTIONS, "prompts", "seed", "in_order")
    return {"model": demo.NAME, **{name: value for name, value in source.items() if name not in other}}


def _open(
    source: dict[str, Any], loading: dict[str, Any], accelerator: Any, num_prompts: int
) -> tuple[Target, PromptSet]:
    """The base and the prompts that it is to answer."""
    from treeopt.runtime.training import opening

    asked = {name: source[name] for name in PROMPT_OPTIONS if name in source}
    seed = None if source.get("in_order") else source.get("seed", 0)
    with progress("Loading", None, accelerator.is_main_process):
        target = opening.open_base(accelerator=accelerator, **loading)
        return target, opening.open_seeds(target, source.get("prompts"), num_prompts, seed, **asked)


def _record(job: TrainingJob, prompts: PromptSet, asking: Asking) -> dict[str, Any]:
    """What training.json says, but for what was reached."""
    from treeopt.runtime.training.heads import size_of_heads

    target, recipe = job.target, job.recipe
    size = size_of_heads(target, recipe)
    provenance = Provenance(
        model=target.name,
        revision=target.revision,
        drafter={"kind": recipe.kind, "num_heads": recipe.num_heads, "num_layers": recipe.layers},
        dataset=prompts.name,
        dataset_fingerprint=prompts.fingerprint,
        acceptance=asking.acceptance.record if job.own else None,
        device=str(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        seed=recipe.seed,
    )
    return {
        "recipe": recipe.record(),
        "heads": {"parameters": size.parameters, "bytes": size.total * size.bytes_each},
        "texts": {
            "own_answers": job.own,
            "max_new_tokens": asking.stop.max_new_tokens,
            "learned": len(job.learned),
            "held_out": len(job.held_out),
            "answer_tokens": sum(text.answer_tokens for text in job.learned),
            "prompt_sha256": [conversation.sha256 for conversation in prompts.conversations],
        },
        "provenance": provenance.record(),
    }


def _check_folder(folder: Path, kind: str) -> None:
    """Raise InvalidInput, before anything is trained, where other weights lie in the folder."""
    if folder.exists() and not folder.is_dir():
        raise InvalidInput(f"--output must be a folder, but {folder} is a file.")
    strange = sorted(file.name for file in folder.glob("*") if file.name.endswith(WEIGHTS))
    if not strange:
        return
    made, unfinished = folder / "training" / "training.json", folder / "training" / CHECKPOINT / "key.json"
    recipes = [
        storage.read_json(made, "training", ("recipe",))["recipe"] if made.exists() else None,
        storage.load_json(unfinished) if unfinished.exists() else None,  # killed while it wrote the heads
    ]
    if kind not in [recipe.get("kind") for recipe in recipes if isinstance(recipe, dict)]:
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


def _asking(target: Target, source: dict[str, Any], wanted: TextOptions) -> Asking:
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
    stop, context = StopRule(target.eos_ids, wanted.max_new_tokens), target.context
    return Asking(stop, acceptance, min(wanted.tokens or context, context))


def _by_workers(cluster: Cluster, home: Path, loading: dict[str, Any], prompts: PromptSet, asking: Asking) -> Elsewhere:
    """Has the answers written by the workers of a cluster."""

    def finish(folder: Path, key: dict[str, Any], sizes: list[int]) -> None:
        place = Place((home / "training").absolute(), folder, key, cluster.workers.journal)
        cluster.start()
        with progress("Answering", sum(sizes)) as advance:
            finish_blocks(cluster, AnswerBlocks(place, loading, prompts, asking), place, sizes, advance)

    return finish


def _texts(
    target: Target,
    prompts: PromptSet,
    asking: Asking,
    own: bool,
    folder: Path,
    accelerator: Any,
    elsewhere: Elsewhere | None,
) -> list[Text]:
    from treeopt.runtime.training.texts import Worker, given_texts, own_texts

    if not own:
        return given_texts(target, prompts, asking)
    worker = Worker(accelerator.process_index, accelerator.num_processes, accelerator.wait_for_everyone)
    shown = accelerator.is_main_process and elsewhere is None
    with progress("Answering", len(prompts.conversations), shown) as advance:
        return own_texts(target, prompts, folder, asking, worker=worker, advance=advance, say=note, elsewhere=elsewhere)


def _command(source: dict[str, Any], folder: Path, kind: str) -> str:
    """The line that uses the result."""
    model = source.get("model", demo.NAME)
    if kind != "medusa-2" and model == demo.NAME:
        return command_line("treeopt", "run", "--drafter", folder)
    heads = ("--model", folder) if kind == "medusa-2" else ("--model", model, "--drafter", folder)
    return command_line("treeopt", "run", *heads, "--prompts", "OTHER_PROMPTS" if "prompts" in source else demo.NAME)
