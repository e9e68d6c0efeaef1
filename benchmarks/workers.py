"""What workers on Ray cost and gain over one process: `python benchmarks/workers.py [ROUNDS] [CALIBRATE OPTIONS]`.

The same calibration, alternately by one process and by two workers on a cluster of this machine, a thread each. Processor seconds
are those of the command and of all that it started, Ray's own processes among them; the blocks are those of 512 prompts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import psutil

CALIBRATE = ["--num-prompts", "512", "--max-new-tokens", "64", "--batch-size", "8", "--dtype", "float64"]
ENGINES = {"one process": [], "two workers": ["--workers", "2"]}


def processor_s(root: psutil.Process, seen: dict[int, float]) -> None:
    """Note the seconds of a process and of its descendants; of those that have ended the last ones stay."""
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        seen[process.pid] = times.user + times.system


def measure(run: Path, engine: list[str], options: list[str]) -> tuple[float, float]:
    """Wall and processor seconds of one calibration."""
    command = [sys.executable, "-m", "treeopt", "calibrate", *CALIBRATE, *options, *engine, "--run", str(run)]
    began, seen = time.perf_counter(), dict[int, float]()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    watched = psutil.Process(process.pid)
    while process.poll() is None:
        with suppress(psutil.Error):
            processor_s(watched, seen)
        time.sleep(0.2)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return time.perf_counter() - began, sum(seen.values())


def main() -> None:
    rounds, options = int((sys.argv[1:] or ["3"])[0]), sys.argv[2:]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ENGINES}
    for number in range(rounds):
        with TemporaryDirectory() as folder:
            for name, engine in list(ENGINES.items())[:: -1 if number % 2 else 1]:
                found[name].append(measure(Path(folder) / name.replace(" ", "-"), engine, options))
            traces = {file.read_bytes() for file in Path(folder).glob("*/trace.npz")}
            print(f"round {number + 1}: {'the same bytes' if len(traces) == 1 else 'DIFFERENT BYTES'}", flush=True)
    for name, times in found.items():
        wall, cpu = (median(column) for column in zip(*times, strict=True))
        print(f"{name}: {wall:.1f} s wall, {cpu:.1f} s of processors")
    pairs = list(zip(*found.values(), strict=True))
    wall, cpu = (median(two[i] / one[i] for one, two in pairs) for i in range(2))
    print(f"two workers over one process: {wall:.2f} of the wall time, {cpu:.2f} of the processor time")


if __name__ == "__main__":
    main()
