"""Steps of llama-server by rows, as a table for `treeopt profile --from-csv`: a text that repeats is drafted nearly in full.

    python benchmarks/llama_rows.py 'llama-server -m MODEL.gguf --parallel 1 --port {port} {options}' > steps.csv

One server for each length of drafts. Its steps verify some rows fewer than asked for where the text says something else, so
times are those of the mean rows, and between these lie on straight lines. Beyond the longest they go on as its last part.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import httpx
import numpy as np

from treeopt.serving.launch import Launcher

LENGTHS = (0, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48)
ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
SIMPLE = "--spec-type ngram-simple --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m"
NAMES = (
    "area width height *",
    "speed distance seconds /",
    "total price tax +",
    "change after before -",
    "force mass jerk *",
)
TEXT = "".join(
    f"def {name}({one}, {other}):\n    return {one} {sign} {other}\n\n"
    for name, one, other, sign in map(str.split, NAMES)
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("launch")
    launcher, known = Launcher.parse(parser.parse_args().launch), list[tuple[float, float]]()
    with tempfile.TemporaryDirectory() as folder:
        for length in LENGTHS:
            options = [*SIMPLE.split(), str(length)] if length else []
            with launcher.launched(options, Path(folder) / "log") as url:
                asked = {"prompt": TEXT * 5, "n_predict": 8 * (length + 5), "temperature": 0, "ignore_eos": True}
                told = httpx.post(f"{url}/completion", json=asked, timeout=600).json()["timings"]
            steps = told["predicted_n"] - 1 - told.get("draft_n_accepted", 0)
            known.append((1 + told.get("draft_n", 0) / steps, told["predicted_ms"] / steps))
    (some, ms), last = zip(*sorted(known), strict=True), sorted(known)[-3]
    slope = (ms[-1] - last[1]) / (some[-1] - last[0])
    print("batch_size,size,step_ms")
    for rows in ROWS:
        print(f"1,{rows},{np.interp(rows, some, ms) + slope * max(rows - some[-1], 0):.3f}")


if __name__ == "__main__":
    main()
