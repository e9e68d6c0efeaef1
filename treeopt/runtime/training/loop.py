"""Steps, and counting on held-out texts; checkpoints, behind which a stopped run goes on.

The texts of a step are spread over passes; the loss of each is divided by the labels of the whole step, so the gradient
is the same however they are spread.

K heads
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from treeopt.errors import InvalidInput, OutOfRange
from treeopt.files import storage, writing
from treeopt.runtime.decode import synchronize
from treeopt.runtime.memory import is_out_of_memory
from treeopt.runtime.target import Target
from treeopt.runtime.training.batches import Batch, Text, make_batch, texts_of_step
from treeopt.runtime.training.losses import count
from treeopt.runtime.training.recipe import CLIP_NORM, PRECISIONS, Recipe

CHECKPOINT_STEPS = 100
LOGGED = ("accuracy", "head_loss_nats")  # of every step
DIGESTS = ("texts", "weights")  # parts of a checkpoint's key whose values say nothing to a reader


@dataclass(frozen=True)
class Position:
    """Where a run is: steps done, and seconds of training that they took."""

    step: int = 0
    seconds: float = 0.0


def record_of(counts: Tensor, trials: Tensor) -> dict[str, object]:
    """Each head's loss and hits over some texts, (2K,), and the rates that follow. trials : (K,) of the heads"""
    tried, sums = trials.tolist(), counts.tolist()
    loss, hits = sums[: len(tried)], sums[len(tried) :]
    return {
        # None for a head without a label
        "accuracy": [total / n if n else None for total, n in zip(hits, tried, strict=True)],
        "head_loss_nats": [total / n if n else None for total, n in zip(loss, tried, strict=True)],
        "hits": [int(total) for total in hits],
        "trials": tried,
    }


def optimisers_of(heads: nn.Module, recipe: Recipe, vocab_size: int) -> list[torch.optim.Optimizer]:
    """AdamW; where the recipe says so, Muon for matrices but the vocabulary's (Jordan, 2024), at AdamW's rates (Moonlight, 2.2)."""
    weights, rate = [weight for weight in heads.parameters() if weight.requires_grad], recipe.peak_rate
    if not recipe.defaults.muon:
        return [torch.optim.AdamW(weights, rate, betas=(0.9, 0.95), weight_decay=0.0)]
    matrices, others = list[nn.Parameter](), list[nn.Parameter]()
    for weight in weights:
        (matrices if weight.ndim == 2 and vocab_size not in weight.shape else others).append(weight)
    muon = torch.optim.Muon(matrices, rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, rate, betas=(0.9, 0.95), weight_decay=0.0)]


class Loop:
    """One run: heads on a base, which is frozen, their optimisers, and the texts.

    precision : number format of matrix products, one of `PRECISIONS`
    log       : file that takes a line of JSON for every step
    """

    def __init__(
        self,
        heads: Any,
        target: Target,
        recipe: Recipe,
        texts: Sequence[Text],
        *,
        checkpoint: Checkpoint,
        log: Path,
        precision: str = PRECISIONS[0],
        checkpoint_steps: int = CHECKPOINT_STEPS,
    ) -> None:
        self.heads, self.target, self.recipe, self.texts = heads, target, recipe, texts
        self.checkpoint, self.log, self.checkpoint_steps = checkpoint, log, checkpoint_steps
        if recipe.batch_size < recipe.accumulate:
            raise InvalidInput(
                f"`batch_size` must be at least 1 for each pass, {recipe.accumulate}, but got {recipe.batch_size}."
            )
        self.num_heads, self.half = heads.num_heads, precision != PRECISIONS[0]
        self.device = next(heads.parameters()).device
        self.optimisers = optimisers_of(heads, recipe, target.vocab_size)
        self.position = self.kept = Position()

    def resume(self) -> Position:
        """Go on from the checkpoint; the log keeps the lines of the steps before."""
        if (kept := self.checkpoint.read()) is not None:
            self.heads.load_state_dict(kept["weights"], strict=False)
            for optimiser, state in zip(self.optimisers, kept["optimisers"], strict=True):
                optimiser.load_state_dict(state)
            self.position = self.kept = Position(kept["step"], kept["seconds"])
        lines = storage.read_text(self.log).splitlines(keepends=True) if self.log.exists() else []
        writing.write_text(self.log, "".join(lines[: self.position.step]))
        return self.position

    def run(self) -> Iterator[Position]:
        """Train to the end of the recipe, and say after every step where it is."""
        recipe, step, seconds = self.recipe, self.position.step, self.position.seconds
        while not recipe.is_over(step, seconds):
            started = time.perf_counter()
            try:
                line = self._gradient(step, seconds)
                with uninterrupted():
                    nn.utils.clip_grad_norm_(self.heads.parameters(), CLIP_NORM)
                    for optimiser in self.optimisers:
                        optimiser.step()
                        optimiser.zero_grad(set_to_none=True)
                    synchronize(self.device)
                    seconds, step = seconds + time.perf_counter() - started, step + 1
                    self.position = Position(step, seconds)
                    line = {"step": step, **line, "seconds": round(seconds, 3)}
                    with self.log.open("a", encoding="utf-8") as stream:
                        stream.write(json.dumps(line) + "\n")
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                raise OutOfRange(
                    f"A step must fit into memory, but one of {recipe.batch_size} texts in {recipe.accumulate} passes "
                    "does not: use more passes (`accumulate`), or shorter texts (`tokens`)."
                ) from None
            if step % self.checkpoint_steps == 0:
                self.keep()
            yield self.position

    def _gradient(self, step: int, seconds: float) -> dict[str, object]:
        """The gradient of a step, left in the parameters; its line of the log. The weights stay as they are."""
        recipe = self.recipe
        rate = recipe.peak_rate * recipe.rate(step, recipe.share(step, seconds))
        for group in (group for optimiser in self.optimisers for group in optimiser.param_groups):
            group["lr"] = rate
        chosen = texts_of_step(step, len(self.texts), recipe.batch_size, recipe.seed)
        some = recipe.defaults.every, step % recipe.defaults.every
        by_length = sorted(chosen, key=lambda i: len(self.texts[i].tokens))  # a pass is as long as its longest text
        parts = np.array_split(by_length, recipe.accumulate)
        batches = [make_batch([self.texts[i] for i in part], self.num_heads, self.device, *some) for part in parts]
        trials = torch.stack([batch.trials for batch in batches]).sum(0)
        total_loss, total = 0.0, torch.zeros(2 * self.num_heads, dtype=torch.float64, device=self.device)
        for batch in batches:
            loss, counts = self._pass(batch, trials)
            loss.backward()
            total_loss += float(loss.detach())
            total += counts
        record = record_of(total, trials)
        return {"loss": total_loss, "learning_rate": rate, **{key: record[key] for key in LOGGED}}

    def _pass(self, batch: Batch, trials: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of a batch, divided by the (K,) labels of the whole step, and each head's loss and hits, (2K,).

        A head's mean loss counts decay**k, k from 1 (Medusa, equation 1); that of a head without a label is 0.
        """
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            with torch.no_grad():
                hidden = self.target.states(input_ids=batch.tokens, use_cache=False)
                teacher = self.target.scored(batch.states(hidden)) if self.recipe.defaults.teacher else None
            losses, hits = count(self.heads, hidden, batch, teacher)
        weights = self.recipe.defaults.decay ** torch.arange(1, 1 + self.num_heads, dtype=torch.float64)
        loss = (weights.to(losses) * losses / trials.clamp_min(1)).sum()
        return loss, torch.cat([losses.double(), hits.double()]).detach()

    @torch.no_grad()
    def count(self, texts: Sequence[Text]) -> dict[str, object]:
        """The record of losses and hits over some texts, with the weights as they are."""
        size = max(1, self.recipe.batch_size // self.recipe.accumulate)
        batches = [make_batch(texts[i : i + size], self.num_heads, self.device) for i in range(0, len(texts), size)]
        trials = torch.stack([batch.trials for batch in batches]).sum(0)
        return record_of(torch.stack([self._pass(batch, trials)[1] for batch in batches]).sum(0), trials)

    def keep(self) -> None:
        """Write the checkpoint, unless the last step is there already."""
        if self.position.step > self.kept.step:
            self.checkpoint.write(self.position, self.heads, self.optimisers)
            self.kept = self.position


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait for the end of the block, so that it is done wholly or not at all."""
    held: list[int] = []
    main = threading.current_thread() is threading.main_thread()  # which alone is interrupted
    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    before = {number: signal.signal(number, lambda number, frame: held.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
    for late in held:
        signal.raise_signal(late)


@dataclass(frozen=True)
class Checkpoint:
    """A file with the state of a run that was stopped: what is trained, and the optimisers' state.

    key : all that the weights depend on, as plain JSON
    """

    file: Path
    key: Mapping[str, object]

    def read(self) -> dict[str, Any] | None:
        """What was written; None where there is nothing. Raises InvalidInput where it is damaged, or of another run."""
        if not self.file.exists():
            return None
        try:
            kept: dict[str, Any] = torch.load(self.file, map_location="cpu", weights_only=True)
        except Exception:  # torch raises anything at damaged bytes
            raise InvalidInput(
                f"The checkpoint {self.file} is damaged. Delete it to train from the beginning."
            ) from None
        known, wanted = json.loads(kept["key"]), json.loads(storage.to_json(self.key))
        differences = [
            name.removeprefix("num_").replace("_", " ")
            + ("" if name in DIGESTS else f" ({known.get(name)}, not {wanted[name]})")
            for name in wanted
            if known.get(name) != wanted[name]
        ]
        if differences:
            raise InvalidInput(
                f"{self.file} is of a half-trained run that differs in {', '.join(differences)}: continue it with its own "
                "command, pass another `output`, or delete that file."
            )
        return kept

    def write(self, position: Position, heads: nn.Module, optimisers: Sequence[torch.optim.Optimizer]) -> None:
        weights = {name: weight.detach().cpu() for name, weight in heads.named_parameters() if weight.requires_grad}
        state = {"weights": weights, "optimisers": [optimiser.state_dict() for optimiser in optimisers]}
        with writing.atomic_writer(self.file) as stream:
            torch.save({"key": storage.to_json(self.key), **vars(position), **state}, stream)
