"""What speculation costs on a GPU, in 25 minutes and without a network: `make gpu`; on a CPU in miniature `make gpu-dry`.

tests      those that are marked gpu
exactness  texts by trees against those of plain decoding, in float32 and bfloat16
SHAPE      steps of a model with random weights: treeopt's own ("eager"), and whole steps on a static cache, each tree's and
           the plain one replayed as a CUDA graph ("graphs"); beside the roofline, with the memory that they take

Every part is a process with a time limit of its own and writes each figure when it has it: a part that was cut off leaves what
it measured, and goes on from there when it is started again. Behind every part profiles, their table and the page are written.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = (
    "click", "hypothesis", "networkx", "numpy", "pydantic", "pytest", "rich", "safetensors", "scipy", "torch",
    "transformers",
)  # fmt: skip
MINUTES = {"tests": 2.5, "exactness": 3.0, "llama-7b": 6.5, "llama-1b": 4.5, "llama-13b": 5.5}
DRY_MINUTES = {"tests": 0.25, "exactness": 0.25, "tiny": 0.25}
START_S, GRACE_S = 15, 45  # that a part has to start, and beyond its time before it is killed


def command_of(name: str, out: Path, seconds: float, dry: bool) -> list[str]:
    if name != "tests":
        words = [sys.executable, str(Path(__file__).with_name("gpu_parts.py")), name, "--out", str(out)]
        return [*words, "--seconds", f"{seconds:.0f}", *["--dry"] * dry]
    marked = [str(file) for file in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in file.read_text("utf-8")]
    return [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={out / 'tests.xml'}", *marked]


def run(out: Path, minutes: float, dry: bool) -> list[str]:
    """Run every part in a process group of its own, which is killed where it does not end in time; sentences on what went wrong."""
    from gpu_page import failures, write_page

    shares, end, wrong = DRY_MINUTES if dry else MINUTES, time.monotonic() + 60 * minutes, []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    for i, (name, share) in enumerate(shares.items()):
        seconds = max((end - time.monotonic()) * share / sum([*shares.values()][i:]) - START_S * (not dry), 1.0)
        print(f"== {name}, {seconds:.0f} s", flush=True)
        process = subprocess.Popen(
            command_of(name, out, seconds, dry), cwd=ROOT, env=environment, start_new_session=True
        )
        try:
            status: int | str = process.wait(seconds + START_S + GRACE_S)
        except subprocess.TimeoutExpired:
            status = "SIGKILL, since its time was over"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        wrong += [f"{name} ended with {status}."] if status else []
        write_page(out, out / "shipped" if dry else ROOT)
    return wrong + failures(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dry", action="store_true", help="all of it on a CPU, in miniature; its page goes below --out"
    )
    parser.add_argument("--out", type=Path, help="folder of what is measured (build/gpu, build/gpu-dry)")
    parser.add_argument("--minutes", type=float, help="of everything together (25; 4 dry, of which it takes one)")
    asked = parser.parse_args()
    if absent := [name for name in NEEDED if not importlib.util.find_spec(name)]:
        sys.exit(
            f"This needs {', '.join(absent)}, which {sys.executable} lacks: make gpu PYTHON=... takes one that has them."
        )
    out = (asked.out or ROOT / "build" / ("gpu-dry" if asked.dry else "gpu")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part that runs is ended too
    if wrong := run(out, asked.minutes or (4.0 if asked.dry else 25.0), asked.dry):
        sys.exit("\n".join([*wrong, f"What was measured is in {out}; the same command goes on from there."]))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
