"""Steps, and counting on held-out texts, on one device or on many.

The texts of a step are spread over processes and passes; the loss of each is divided by the labels of the
whole step, so the gradient is the same however they are spread.

A checkpoint is two files, named by the step: weights (safetensors, only what is trained) and the optimiser's state (torch,
loadable without pickles). ``state.json`` names the step whose files are whole; it is written last.

W processes · A passes of each per step · K heads
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from treeopt.errors import InvalidInput, OutOfRange
from treeopt.files import storage, writing
from treeopt.files.journal import Journal
from treeopt.files.storage import read_text
from treeopt.files.writing import append_line, write_text
from treeopt.runtime.checkpoints.save import write_tensors
from treeopt.runtime.decode import synchronize
from treeopt.runtime.folder import reason_of
from treeopt.runtime.memory import is_out_of_memory
from treeopt.runtime.training.batches import Text, count_trials, make_batch, texts_of_step
from treeopt.runtime.training.recipe import CLIP_NORM, Recipe
from treeopt.runtime.training.trainees import FrozenStates, Sums
from treeopt.trees.tree import IntArray

CHECKPOINT_STEPS = 100
LOGGED = ("accuracy", "head_loss_nats", "base_nats_per_token", "base_kl_nats_per_token")  # of every step
PER_HEAD = ("head_loss", "hits")


def record_of(sums: Sums, trials: IntArray) -> dict[str, object]:
    """For files: what was counted over some texts, and the rates that follow. trials : (K+1,) of base and heads."""
    tokens, *tried = trials.tolist()

    def rates(found: Tensor) -> list[float | None]:  # None for a head without a label
        return [total / n if n else None for total, n in zip(found.tolist(), tried, strict=True)]

    base = [float(found) / max(tokens, 1) if sums.base_loss else None for found in (sums.base_loss, sums.base_kl)]
    return {
        "accuracy": rates(sums.hits),
        "head_loss_nats": rates(sums.head_loss),
        "hits": sums.hits.long().tolist(),
        "trials": tried,
        "base_nats_per_token": base[0],
        "base_kl_nats_per_token": base[1],
    }


class Loop:
    """One run: a trainee, its optimiser, and the texts, under an `accelerate.Accelerator`.

    log : file that takes a line of JSON for every step
    """

    def __init__(
        self,
        accelerator: Any,
        trainee: Any,
        recipe: Recipe,
        texts: Sequence[Text],
        states: FrozenStates | None,
        *,
        checkpoints: Checkpoints,
        log: Path,
        checkpoint_steps: int = CHECKPOINT_STEPS,
    ) -> None:
        self.accelerator, self.recipe, self.texts, self.states = accelerator, recipe, texts, states
        self.checkpoints, self.log, self.checkpoint_steps = checkpoints, log, checkpoint_steps
        passes = accelerator.num_processes * recipe.accumulate
        if recipe.batch_size < passes:
            raise InvalidInput(
                f"`batch_size` must be at least 1 for each process and pass, {passes}, but got {recipe.batch_size}."
            )
        groups = [{**group, "lr": group["peak"]} for group in trainee.groups()]
        optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
        self.trainee = trainee  # itself, where `model` may be wrapped
        self.device = next(trainee.heads.parameters()).device
        self.model, self.optimiser = accelerator.prepare(trainee, optimiser)
        self.position = Position()

    def resume(self) -> Position:
        """Go on from the last checkpoint; the log keeps the lines of the steps before."""
        if self.accelerator.is_main_process:
            self.checkpoints.open()
        self.accelerator.wait_for_everyone()
        self.position = self.checkpoints.load(self.trainee, self.optimiser, self.accelerator.scaler)
        if self.accelerator.is_main_process:
            lines = read_text(self.log).splitlines() if self.log.exists() else []
            write_text(self.log, "".join(f"{line}\n" for line in lines[: self.position.step]))
        return self.position

    def run(self) -> Iterator[Position]:
        """Train to the end of the recipe, and say after every step where it is."""
        self.model.train()
        started = time.perf_counter()
        step, alone = self.position.step, self.accelerator.num_processes == 1
        several = self.recipe.steps is None or self.recipe.steps * self.recipe.batch_size > len(self.texts)  # epochs
        if several and alone and self.states is not None and self.states.fit:
            self.states.keep(self.recipe.batch_size)
        # What was kept helps the steps to come, so it is on their clock; but there has to be time for some.
        seconds = self._together(self.position.seconds + time.perf_counter() - started)
        if step == 0 and self.recipe.is_over(step, seconds):
            raise OutOfRange(
                f"Training needs time for a step, but reading the texts took {seconds / 60:.1f} minutes: raise `minutes`."
            )
        # Several processes keep nothing when they are stopped, and may have to be stopped while they wait.
        while not self.recipe.is_over(step, seconds):
            started = time.perf_counter()
            try:
                line = self._gradient(step, seconds)
                with uninterrupted() if alone else nullcontext():
                    self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
                    self.optimiser.step()
                    self.optimiser.zero_grad(set_to_none=True)
                    synchronize(self.accelerator.device)
                    seconds, step = self._together(seconds + time.perf_counter() - started), step + 1
                    self.position = Position(step, seconds)
                    self._write({"step": step, **line, "seconds": round(seconds, 3)})
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                raise OutOfRange(
                    f"A step must fit into memory, but one of {self.recipe.batch_size} texts in "
                    f"{self.recipe.accumulate} passes does not: use more passes (`accumulate`), or shorter "
                    "texts (`tokens`)."
                ) from None
            if step % self.checkpoint_steps == 0:
                self.checkpoint()
            yield self.position

    def _gradient(self, step: int, seconds: float) -> dict[str, object]:
        """The gradient of a step, left in the parameters; its line of the log. The weights stay as they are."""
        recipe, accelerator = self.recipe, self.accelerator
        share = recipe.share(step, seconds)
        rate = recipe.rate(step, share)
        for group in self.optimiser.param_groups:
            group["lr"] = group["peak"] * rate
        chosen = texts_of_step(step, len(self.texts), recipe.batch_size, recipe.seed)
        trials = count_trials([self.texts[i] for i in chosen], self.trainee.heads.num_heads)
        mine = chosen[accelerator.process_index :: accelerator.num_processes]
        torch.manual_seed(recipe.seed + step * accelerator.num_processes + accelerator.process_index)  # dropout
        parts = np.array_split(mine, recipe.accumulate)
        found = []
        for n, part in enumerate(parts, 1):
            with nullcontext() if n == len(parts) else accelerator.no_sync(self.model):
                sums = self._pass(self.model, self.texts, self.states, part.tolist(), trials, share)
                # Processes average their gradients, where the step's is the sum.
                accelerator.backward(sums.loss * accelerator.num_processes)
                found.append(sums)
        total = self._summed(found)
        record = record_of(total, trials)
        return {
            "loss": float(total.loss),
            "learning_rate": recipe.peak_rate * rate,
            **{key: record[key] for key in LOGGED if record[key] is not None},
        }

    def _pass(
        self,
        model: Any,
        texts: Sequence[Text],
        states: FrozenStates | None,
        places: list[int],
        trials: IntArray,
        share: float,
    ) -> Sums:
        batch = make_batch([texts[i] for i in places], self.trainee.heads.num_heads, self.device)
        hidden = states.of(places, batch) if states is not None else None
        return model(batch, hidden, torch.from_numpy(trials).to(self.device), share)

    @torch.no_grad()
    def count(self, texts: Sequence[Text], states: FrozenStates | None) -> dict[str, object]:
        """The record of losses and hits over some texts, with the weights as they are."""
        self.trainee.eval()
        trials = count_trials(texts, self.trainee.heads.num_heads)
        mine = range(self.accelerator.process_index, len(texts), self.accelerator.num_processes)
        size = max(1, self.recipe.batch_size // self.accelerator.num_processes // self.recipe.accumulate)
        found = [
            self._pass(self.trainee, texts, states, list(mine[i : i + size]), trials, 1.0)
            for i in range(0, len(mine), size)
        ]
        self.trainee.train()
        return record_of(self._summed(found), trials)

    def _summed(self, found: Sequence[Sums]) -> Sums:
        """Sums over passes and processes."""
        parts = []
        for name in Sums._fields:
            shape = self.trainee.heads.num_heads if name in PER_HEAD else ()
            total = torch.zeros(shape, dtype=torch.float64, device=self.device)
            for sums in found:
                total += getattr(sums, name).detach()
            parts.append(self.accelerator.reduce(total, "sum"))
        return Sums(*parts)

    def keep(self) -> Position:
        """Where a run that is stopped now goes on: here, or with several processes at the last checkpoint."""
        if self.accelerator.num_processes == 1 and self.position.step > self.checkpoints.position().step:
            self.checkpoint()
        return self.checkpoints.position()

    def checkpoint(self) -> None:
        """Keep where the run is now."""
        if self.accelerator.is_main_process:
            self.checkpoints.save(self.position, self.trainee, self.optimiser, self.accelerator.scaler)
        self.accelerator.wait_for_everyone()

    def _write(self, line: dict[str, object]) -> None:
        if self.accelerator.is_main_process:
            append_line(self.log, json.dumps(line))

    def _together(self, seconds: float) -> float:
        """The first process's clock, so that all of them end at the same step."""
        if self.accelerator.num_processes == 1:
            return seconds
        from accelerate.utils import broadcast

        return float(broadcast(torch.tensor(seconds, dtype=torch.float64, device=self.accelerator.device)))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait for the end of the block, so that it is done wholly or not at all."""
    if threading.current_thread() is not threading.main_thread():  # which alone is interrupted
        yield
        return
    held: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: held.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
    for late in held:
        signal.raise_signal(late)


STATE = "state.json"
DIGESTS = ("texts", "weights")  # keys whose values say nothing to a reader


@dataclass(frozen=True)
class Position:
    """Where a run is: steps done, and seconds of training that they took."""

    step: int = 0
    seconds: float = 0.0


class Checkpoints:
    """The checkpoints of one run, under a folder of their own.

    key : all that the weights depend on, as plain JSON
    """

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        self.folder, self.key = folder, key

    def check(self) -> None:
        """Raise InvalidInput where the folder has a checkpoint of another run."""
        if not (self.folder / STATE).exists():
            return
        known, wanted = storage.load_json(self.folder / "key.json"), json.loads(storage.to_json(self.key))
        known = known if isinstance(known, dict) else {}
        other = [name for name in wanted if known.get(name) != wanted[name]]
        if other:
            said = [
                name.removeprefix("num_").replace("_", " ")
                + ("" if name in DIGESTS else f" ({known.get(name)}, not {wanted[name]})")
                for name in other
            ]
            raise InvalidInput(
                f"{self.folder} holds a half-trained run that differs in {', '.join(said)}: continue it with its own "
                "command, pass another `output`, or delete that folder."
            )

    def open(self) -> None:
        """Begin, or keep what there is of this run."""
        self.check()
        Journal(self.folder, self.key)

    def position(self) -> Position:
        """Where the last checkpoint is; the beginning where there is none."""
        file = self.folder / STATE
        return storage.typed(Position, storage.load_json(file), file) if file.exists() else Position()

    def save(self, position: Position, module: nn.Module, optimiser: Any, scaler: Any = None) -> None:
        name = f"{position.step:08d}"
        write_tensors(self.folder / f"{name}.safetensors", weights(module))
        state = {"optimiser": optimiser.state_dict(), "scaler": None if scaler is None else scaler.state_dict()}
        with writing.atomic_writer(self.folder / f"{name}.optimiser") as stream:
            torch.save(state, stream)
        writing.write_text(self.folder / STATE, storage.to_json(vars(position)) + "\n")
        for file in self.folder.iterdir():
            if file.suffix in (".safetensors", ".optimiser") and not file.name.startswith(name):
                file.unlink()

    def load(self, module: nn.Module, optimiser: Any, scaler: Any = None) -> Position:
        """Put the last checkpoint into module and optimiser; the beginning where there is none."""
        from safetensors.torch import load_file

        position = self.position()
        if not position.step:
            return position
        name = f"{position.step:08d}"
        try:
            stored = load_file(self.folder / f"{name}.safetensors")
            state = torch.load(self.folder / f"{name}.optimiser", weights_only=True, map_location="cpu")
            missing, strange = module.load_state_dict(stored, strict=False)
            if strange or set(missing) & weights(module).keys():
                raise ValueError(f"{name}.safetensors must have all that is trained, and nothing else")
            optimiser.load_state_dict(state["optimiser"])
            if scaler is not None:
                scaler.load_state_dict(state["scaler"])
        except Exception as error:  # safetensors and torch raise anything at damaged files
            raise InvalidInput(
                f"{self.folder} cannot be continued: {reason_of(error)}. Delete it to begin anew."
            ) from None
        return position


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """The weights of a module that are trained, on the CPU."""
    return {name: p.detach().cpu().contiguous() for name, p in module.named_parameters() if p.requires_grad}
