"""Train: heads for a model that has none.

Everything that a run makes beside the heads themselves lies in the folder ``training`` beside them: the
answers, checkpoints while it runs, a line for every step (log.jsonl), what was reached (training.json), and
curves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from treeopt import demo
from treeopt.errors import InvalidInput
from treeopt.files import storage
from treeopt.files.journal import Journal
from treeopt.files.parameters import Count
from treeopt.files.provenance import Provenance
from treeopt.files.shell import command_line
from treeopt.files.writing import sole_writer
from treeopt.pipeline.session import located_source
from treeopt.pipeline.training_job import CHECKPOINT, TrainingJob
from treeopt.pipeline.workers import AnswerBlocks, finish_blocks
from treeopt.report.terminal import note, progress
from treeopt.runtime.training.recipe import PRECISIONS

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
    record: dict[str, object]
    command: str

    def document(self) -> dict[str, object]:
        return {**self.record, "files": [str(file) for file in self.files], "command": self.command}


@dataclass(frozen=True)
class TextOptions:
    """The texts to learn from.

    num_prompts    : prompts to answer
    max_new_tokens : longest answer
    tokens         : longest text, prompt included; by default the model's context
    answers        : folder for the model's answers, which several runs may share; by default beside the heads
    """

    num_prompts: Count = 1024
    max_new_tokens: Count = 128
    tokens: Count | None = None
    answers: Path | None = None


def train(
    folder: Path,
    source: Mapping[str, Any],
    recipe: Recipe,
    wanted: TextOptions,
    *,
    mixed_precision: Annotated[str, PRECISIONS] | None = None,
    load_in_8bit: bool = False,
    cluster: Cluster | None = None,
) -> Training | None:
    """Train heads into ``folder``; None in all but the first process of several.

    source          : what loads the model and its prompts, and the rule that its answers are written by
    mixed_precision : number format of matrix products
    load_in_8bit    : load the frozen base in 8 bits (needs bitsandbytes and CUDA)
    cluster         : whose workers write the answers
    """
    from treeopt.runtime.training import opening

    if cluster is not None and "responses" in source:
        raise InvalidInput(
            "`engine=ray` has the model's own answers written, but `responses` are given: leave one out."
        )
    if source.get("acceptance") not in (None, "greedy", "sample"):
        raise InvalidInput(
            "The model writes answers to learn from greedily or with `acceptance=sample`, but got "
            f"`acceptance={source['acceptance']}`: leave it out."
        )
    _check_folder(folder, recipe.kind)
    opening.check_packages(recipe, load_in_8bit=load_in_8bit)
    accelerator = opening.open_accelerator(
        recipe, device=source.get("device"), dtype=source.get("dtype"), mixed_precision=mixed_precision
    )
    is_main, loading = accelerator.is_main_process, {**_loading(located_source(source)), "load_in_8bit": load_in_8bit}
    with writing_heads(folder, wanted.answers, lock=is_main):
        job, record = _prepared(folder, source, recipe, wanted, accelerator, loading, cluster)
        files, reached = job.run()
        if is_main:
            record |= reached
            job.write_record(record)
        accelerator.end_training()
        return Training(folder, files, record, _command(source, folder, recipe)) if is_main else None


def _prepared(
    folder: Path,
    source: Mapping[str, Any],
    recipe: Recipe,
    wanted: TextOptions,
    accelerator: Any,
    loading: Mapping[str, Any],
    cluster: Cluster | None,
) -> tuple[TrainingJob, dict[str, object]]:
    """The job, once the texts to learn from are written, and its record but for what will be reached."""
    from treeopt.runtime.training.batches import split_texts
    from treeopt.runtime.training.heads import size_of_heads

    is_main, own = accelerator.is_main_process, "responses" not in source
    target, prompts = _open(located_source(source), loading, accelerator, wanted.num_prompts)
    size, asking = size_of_heads(target, recipe), _asking(target, source, wanted)
    if is_main:
        note(f"{recipe.kind} heads: {size}")
    elsewhere = None if cluster is None else partial(_finish, cluster, loading, prompts, asking)
    kept = (wanted.answers or folder / "training").absolute()
    learned, held_out = split_texts(_texts(target, prompts, asking, kept if own else None, accelerator, elsewhere))
    longest = max(text.answer_tokens for text in learned)
    if recipe.num_heads >= longest:
        raise InvalidInput(
            f"`num_heads` must be below {longest}, the tokens of the longest answer to learn from, but got {recipe.num_heads}: "
            "lower it, or learn from longer answers (`max_new_tokens`)."
        )
    answered = sum(text.answer_tokens for text in learned)
    if is_main:
        few = ", too few to tell how good the heads are: use more prompts" * (len(held_out) < FEW_HELD_OUT)
        note(f"{len(learned):,} texts to learn from, {answered:,} tokens; {len(held_out):,} held out{few}.")
    texts = {
        "own_answers": own,
        "max_new_tokens": asking.stop.max_new_tokens,
        "learned": len(learned),
        "held_out": len(held_out),
        "answer_tokens": answered,
        "prompt_sha256": [conversation.sha256 for conversation in prompts.conversations],
    }
    recipe = recipe.over(len(learned))
    provenance = Provenance(
        model=target.name,
        revision=target.revision,
        drafter={"kind": recipe.kind, "num_heads": recipe.num_heads, "num_layers": recipe.layers},
        dataset=prompts.name,
        dataset_fingerprint=prompts.fingerprint,
        acceptance=asking.acceptance.record if own else None,
        device=str(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        seed=recipe.seed,
    )
    return TrainingJob(folder, accelerator, target, recipe, learned, held_out, own), {
        "recipe": recipe.record(),
        "heads": {"parameters": size.parameters, "bytes": size.total * size.bytes_each},
        "texts": texts,
        "provenance": provenance.record(),
    }


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
        "another `output`."
    )
    try:
        with sole_writer(folder / "training", places(), refusal, lock=lock):
            yield
    finally:
        with suppress(OSError):
            folder.rmdir()  # where nothing was written


def _loading(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options that load the base."""
    other = (*PROMPT_OPTIONS, *RULE_OPTIONS, "prompts", "seed", "in_order")
    return {"model": demo.NAME, **{name: value for name, value in source.items() if name not in other}}


def _open(
    source: Mapping[str, Any], loading: Mapping[str, Any], accelerator: Any, num_prompts: int
) -> tuple[Target, PromptSet]:
    """The base and the prompts that it is to answer."""
    from treeopt.runtime.training import opening

    asked = {name: source[name] for name in PROMPT_OPTIONS if name in source}
    seed = None if source.get("in_order") else source.get("seed", 0)
    with progress("Loading", None, accelerator.is_main_process):
        target = opening.open_base(accelerator=accelerator, **loading)
        return target, opening.open_seeds(target, source.get("prompts"), num_prompts, seed, **asked)


def _check_folder(folder: Path, kind: str) -> None:
    """Raise InvalidInput, before anything is trained, where other weights lie in the folder."""
    if folder.exists() and not folder.is_dir():
        raise InvalidInput(f"`output` must be a folder, but {folder} is a file.")
    strange = sorted(file.name for file in folder.glob("*") if file.name.endswith(WEIGHTS))
    if not strange:
        return
    made, unfinished = folder / "training" / "training.json", folder / "training" / CHECKPOINT / "key.json"
    recipes = [
        storage.read_json(made, "training").get("recipe") if made.exists() else None,
        storage.load_json(unfinished) if unfinished.exists() else None,  # killed while it wrote the heads
    ]
    if kind not in [recipe.get("kind") for recipe in recipes if isinstance(recipe, dict)]:
        raise InvalidInput(
            f"`output` must be a folder without other weights, but {folder} has {strange[0]}: pass a new one."
        )


def _asking(target: Target, source: Mapping[str, Any], wanted: TextOptions) -> Asking:
    from treeopt.runtime.acceptance.open import open_acceptance
    from treeopt.runtime.stop import StopRule
    from treeopt.runtime.training.texts import Asking

    rule = {name: source[name] for name in RULE_OPTIONS if name in source}
    if rule and "responses" in source:
        raise InvalidInput(
            f"`{next(iter(rule))}` says how the model writes its answers, but `responses` are given: leave one out."
        )
    name = rule.pop("acceptance", "sample" if rule else "greedy")
    if name == "sample" and "seed" in source:
        rule["seed"] = source["seed"]
    acceptance = open_acceptance(name, rule.pop("temperature", None), **rule)
    stop, context = StopRule(target.eos_ids, wanted.max_new_tokens), target.context
    return Asking(stop, acceptance, min(wanted.tokens or context, context))


def _finish(
    cluster: Cluster,
    loading: Mapping[str, Any],
    prompts: PromptSet,
    asking: Asking,
    folder: Path,
    key: dict[str, object],
    sizes: list[int],
) -> None:
    """Have the blocks of answers finished that are not, by the workers of a cluster."""
    cluster.start()
    with progress("Answering", sum(sizes)) as advance:
        finish_blocks(
            cluster, AnswerBlocks(loading, key, prompts, asking), Journal(folder, key, ".npz"), sizes, advance
        )


def _texts(
    target: Target, prompts: PromptSet, asking: Asking, kept: Path | None, accelerator: Any, elsewhere: Elsewhere | None
) -> list[Text]:
    """The texts to learn from: the model's own answers, which lie in ``kept``, or the given ones."""
    from treeopt.runtime.training.texts import Worker, given_texts, own_texts

    if kept is None:
        return given_texts(target, prompts, asking)
    worker = Worker(accelerator.process_index, accelerator.num_processes, accelerator.wait_for_everyone)
    shown = accelerator.is_main_process and elsewhere is None
    with progress("Answering", len(prompts.conversations), shown) as advance:
        return own_texts(target, prompts, kept, asking, worker=worker, advance=advance, say=note, elsewhere=elsewhere)


def _command(source: Mapping[str, Any], folder: Path, recipe: Recipe) -> str:
    """The line that uses the result."""
    model = source.get("model", demo.NAME)
    trains_base = recipe.defaults.trains_base
    if not trains_base and model == demo.NAME:
        return command_line("treeopt", "run", "--drafter", folder)
    heads = ("--model", folder) if trains_base else ("--model", model, "--drafter", folder)
    return command_line("treeopt", "run", *heads, "--prompts", "OTHER_PROMPTS" if "prompts" in source else demo.NAME)
