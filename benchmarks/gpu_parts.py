"""The parts of `gpu.py` that need a device: `python benchmarks/gpu_parts.py NAME --out FOLDER --seconds N [--dry]`."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from gpu_steps import StaticVisits, static_texts

from treeopt import __version__
from treeopt.errors import TreeoptError
from treeopt.files import storage
from treeopt.files.places import shipped
from treeopt.files.writing import write_text
from treeopt.growth.source import source_of
from treeopt.latency.hardware import SHAPES, ModelShape
from treeopt.latency.rounds import PRECISION, time_steps
from treeopt.pipeline.profile.outcome import finish
from treeopt.pipeline.profile.placement import timing_trees, tree_families
from treeopt.pipeline.profile.timed import all_timings, profile
from treeopt.records.calibration import Calibration
from treeopt.records.options import ProfileOptions, Source
from treeopt.records.profile import LatencyProfile, ProfileSetting
from treeopt.records.rundir import RunDirectory
from treeopt.runtime.decode import decode, synchronize
from treeopt.runtime.random_weights import NUM_HEADS, RANDOM, open_random_session
from treeopt.runtime.session import Session, open_session
from treeopt.runtime.stepper import PLAIN, rows_at
from treeopt.runtime.stop import StopRule
from treeopt.trees.tree import Tree

ACCURACIES = "vicuna-7b-medusa1"  # which trees are grown on
CONTEXT = 4096  # of the shapes
Texts = list[tuple[list[int], int]]  # the tokens of every answer and its steps
TEXT_TREE = Tree.dense([4, 2, 2])
NAMES = {  # what is in CUDA's name of a device, the longer ones first
    "H100 PCIe": "H100-PCIe", "H100": "H100-SXM", "H200": "H200-SXM", "A100 80GB PCIe": "A100-80GB-PCIe",
    "A100-SXM4-80GB": "A100-80GB-SXM", "A100-SXM4-40GB": "A100-40GB-SXM", "L40S": "L40S", "L4": "L4", "A10G": "A10G",
    "RTX 4090": "RTX-4090",
}  # fmt: skip
FULL: dict[str, Any] = {
    "shapes": (SHAPES["llama-7b"], ModelShape("llama-1b", 16, 2048, 8192, 32, 8, 64, 128256), SHAPES["llama-13b"]),
    "settings": tuple(product((1, 4, 16), (512, 2048))),
    "sizes": (2, 4, 8, 16, 24, 32, 48, 64),
    "texts": (8, 48),  # and their tokens
    "most_s": 40.0,  # of a setting
    "square": 8192,  # of the matrices that the roofs are measured with
}
DRY: dict[str, Any] = {
    "shapes": (ModelShape("tiny", 2, 64, 128, 4, 2, 16, 256),),
    "settings": ((1, 48), (2, 48)),
    "sizes": (2, 8),
    "texts": (2, 10),
    "most_s": 1.0,
    "square": 256,
}


class Part:
    """What one part works with: its sizes, device, time, and the file that its figures are written to, one by one."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.name, self.folder, self.sizes = asked.name, asked.out, DRY if asked.dry else FULL
        self.device, self.end = "cpu" if asked.dry else "cuda", time.monotonic() + asked.seconds
        self.file = self.folder / f"{asked.name}.json"
        known: list[dict[str, Any]] = storage.load_json(self.file) if self.file.exists() else []
        self.found = [figure for figure in known if "failed" not in figure]  # what failed is tried again

    def add(self, **figure: Any) -> None:
        self.found.append(figure)
        write_text(self.file, storage.to_json(self.found))
        print(" ".join(f"{name}={value}" for name, value in figure.items()), flush=True)

    def knows(self, **key: Any) -> bool:
        return any(key.items() <= figure.items() for figure in self.found)

    def left_s(self) -> float:
        return self.end - time.monotonic()

    def open(self, shape: ModelShape, dtype: str) -> Session:
        names = {"hidden_size": shape.width, "intermediate_size": shape.inner, "num_hidden_layers": shape.layers}
        names |= {
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_width,
        }
        file = self.folder / "configs" / f"{shape.name}.json"
        known = {"model_type": "llama", **names, "vocab_size": shape.vocab_size, "max_position_embeddings": CONTEXT}
        write_text(file, storage.to_json(known))
        return open_random_session(str(file), dtype=dtype, device=self.device)


def run_exactness(part: Part) -> None:
    small = min(part.sizes["shapes"], key=lambda shape: shape.width)
    for dtype, shape in product(("float32", "bfloat16"), (None, small)):
        compare_texts(part, dtype, shape)
        gc.collect()


def compare_texts(part: Part, dtype: str, shape: ModelShape | None) -> None:
    """Every way to decode against plain decoding of one row at a time, of a shape or of the demo model."""
    session = part.open(shape, dtype) if shape else open_session(Source(dtype=dtype, device=part.device))
    count, most = part.sizes["texts"]
    prompts = [c.first[:64] for c in session.prompts.conversations[:count]]
    setup = replace(session.setup(most), stop=StopRule(frozenset(), most, at_loops=False))

    def own(tree: Tree, batch_size: int) -> Texts:
        drafter = setup.drafter if len(tree) > 1 else None
        rows = decode(setup.target, drafter, prompts, tree, batch_size=batch_size, stop=setup.stop)
        return [(row.tokens, row.steps) for row in rows]

    def replayed(tree: Tree, batch_size: int) -> Texts:
        return static_texts(setup, prompts, tree, batch_size)

    plain, ways = own(PLAIN, 1), {"eager": own, "graphs": replayed}
    for way, tree, batch_size in product(ways, (PLAIN, TEXT_TREE), (1, 4)):
        key = {
            "model": shape.name if shape else "demo",
            "dtype": dtype,
            "way": way,
            "rows": len(tree),
            "batch_size": batch_size,
        }
        if part.left_s() < 0 or part.knows(**key):
            continue
        rows = ways[way](tree, batch_size)
        same = sum(ours == theirs for (ours, _), (theirs, _) in zip(rows, plain, strict=True))
        wrong = {"failed": f"{count - same} of {count} texts differ"} if dtype == "float32" and same < count else {}
        tokens_per_step = round(count * (most - 1) / sum(steps for _, steps in rows), 4)
        part.add(**key, equal=same, compared=count, tokens_per_step=tokens_per_step, **wrong)


def run_shape(part: Part) -> None:
    """Steps of a shape at every setting, in every way; the time that is left is shared by those that are left."""
    shape = next(shape for shape in part.sizes["shapes"] if shape.name == part.name)
    session = part.open(shape, "bfloat16")
    if not part.knows(kind="roofs"):
        part.add(kind="roofs", shape=shape.name, **roofs(session, part.sizes["square"]))
    named = next(figure for figure in part.found if figure.get("kind") == "roofs")["roofline"]
    ways = {"graphs": time_graphs, "eager": time_eager}
    asked = list(product(part.sizes["settings"], ways))
    for i, ((batch_size, context), way) in enumerate(asked):
        key, run = (
            {"batch_size": batch_size, "context_tokens": context, "way": way},
            RunDirectory(part.folder / f"{shape.name}-{way}"),
        )
        seconds = min(part.left_s() / (len(asked) - i), part.sizes["most_s"])
        if part.knows(**key) or seconds < 1:
            continue
        if part.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.monotonic()
        try:
            figures = ways[way](part, run, session, (batch_size, context), seconds)
        except (TreeoptError, RuntimeError, MemoryError) as error:  # said, and the next one is measured
            figures = {"failed": str(error).strip().split("\n")[0] or type(error).__name__}
        peak = torch.cuda.max_memory_allocated() if part.device == "cuda" else None
        weights = sum(weight.nbytes for weight in session.target.model.parameters())
        part.add(
            **key,
            roofline=named,
            weight_bytes=weights,
            peak_bytes=peak,
            seconds=round(time.monotonic() - began, 1),
            **figures,
        )
        gc.collect()
        if part.device == "cuda":
            torch.cuda.empty_cache()


def time_eager(part: Part, run: RunDirectory, session: Session, at: tuple[int, int], seconds: float) -> dict[str, Any]:
    """Steps of treeopt's own decoder, by its own profile."""
    wanted = ProfileOptions(
        batch_sizes=at[:1], contexts=at[1:], sizes=part.sizes["sizes"], calibration=ACCURACIES, time_limit_s=seconds
    )
    profile(run, session, wanted)
    return {}


def time_graphs(part: Part, run: RunDirectory, session: Session, at: tuple[int, int], seconds: float) -> dict[str, Any]:
    """Replayed steps, of the trees that `time_eager` times."""
    began, sizes = time.monotonic(), part.sizes["sizes"]
    families = tree_families(source_of(Calibration.load(shipped("calibration")[ACCURACIES])), NUM_HEADS, max(sizes))
    prompts, stop = rows_at(at[1], [c.first for c in session.prompts.conversations[: at[0]]], session.target)
    visits = StaticVisits(replace(session.setup(1), stop=stop), prompts, timing_trees(families, sizes, given=True))
    rounds = time_steps(visits, time_limit_s=max(seconds - (time.monotonic() - began), 1.0))
    points, plain = all_timings({at: rounds})
    runtime = {**session.runtime(), "name": "benchmarks/gpu.py", "version": __version__, "weights": RANDOM}
    info = {"measures": "step", "provenance": session.provenance(seed=0).record, "inputs": {}}
    info |= {"settings": [ProfileSetting(batch_size=at[0], context_tokens=at[1])]}
    finish(run, LatencyProfile(points, plain, runtime, info), PRECISION)
    return {"difference": visits.difference, "columns": visits.cache.capacity}


@torch.inference_mode()
def roofs(session: Session, n: int) -> dict[str, Any]:
    """The best of ten matrix products [TFLOP/s] and copies [TB/s], and the device whose roofline steps are compared with."""
    device = session.target.device
    square, long = (
        torch.randn(n, n, device=device).bfloat16(),
        torch.zeros(16 * n * n, dtype=torch.uint8, device=device),
    )
    other = torch.empty_like(long)

    def best_s(work: Callable[[], object]) -> float:
        found = []
        for _ in range(10):
            synchronize(device)
            began = time.perf_counter()
            work()
            synchronize(device)
            found.append(time.perf_counter() - began)
        return min(found)

    tflops, tb_per_s = (
        2 * n**3 / best_s(lambda: square @ square) / 1e12,
        2 * len(long) / best_s(lambda: other.copy_(long)) / 1e12,
    )
    title = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    known = next((ours for theirs, ours in NAMES.items() if theirs in title), f"{tflops:.4g}:{tb_per_s:.4g}")
    return {"device": title, "tflops": tflops, "tb_per_s": tb_per_s, "roofline": known}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--dry", action="store_true")
    asked = parser.parse_args()
    if not asked.dry and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device here, so nothing is measured: make gpu-dry runs all of it on a CPU.")
    work = run_exactness if asked.name == "exactness" else run_shape
    work(Part(asked))


if __name__ == "__main__":
    main()
