"""Pictures of a block drafter's choices on simulated guesses: docs/images/widths.png and ddtree.png.

`python benchmarks/block_figures.py [RUN]` draws them of a run with `calibrate --widths`, or without one of a simulation, as no
built-in drafter has blocks of several widths. How often each guess is right falls as published tables of DFlash say; hard tokens are hard for
every block that guesses them, and the probabilities are honest.

P states · K guesses of a block · V tokens
"""

from pathlib import Path
from sys import argv

import numpy as np
import torch

from treeopt.records.pools import Counts
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import MISS, NO_TRIAL, RankTrace
from treeopt.report.figures.blocks import ddtree_chart, widths_chart
from treeopt.report.figures.chart import draw
from treeopt.report.figures.style import save
from treeopt.runtime.drafters.marginals import MarginalDraft
from treeopt.trees.draft import MOST_WIDTH

SEQUENCES, LENGTH, TOKENS, FALLING = 40, 120, 24, 0.8
RIGHT = {3: (0.74, 0.62, 0.51), 5: (0.72, 0.59, 0.47, 0.40, 0.36), 7: (0.70, 0.56, 0.43, 0.36, 0.33, 0.30, 0.28)}


class Given(MarginalDraft):
    """Drafts by (P, K, V) log-probabilities, one state a row; a token is its rank."""

    def __init__(self, logs: torch.Tensor) -> None:
        self.logs = logs

    def named(self, guesses: torch.Tensor, depth: object) -> torch.Tensor:
        return guesses

    def marginals(self, roots: torch.Tensor, depth: int) -> torch.Tensor:
        return self.logs[roots, :depth]


def block_of(right: tuple[float, ...], ease: np.ndarray, luck: np.ndarray) -> dict[str, np.ndarray]:
    """(P, K) ranks and the places of the true paths, of a block whose guesses are right so often.

    ease, luck : (S, N) of each token, how easy it is, and where in its probabilities it falls
    """
    states, depth = ease.size, len(right)
    places = np.arange(ease.shape[1])[:, None] + 1 + np.arange(depth)  # of the guessed tokens
    inside = places < ease.shape[1]
    easy, lot = (of[:, np.minimum(places, ease.shape[1] - 1)] for of in (ease, luck))  # (S, N, K)
    grid = np.linspace(-6, 6, 241)
    means = (1 / (1 + np.exp(-(grid[:, None] + ease.ravel())))).mean(1)
    best = 1 / (1 + np.exp(-(np.interp(right, means, grid) + easy)))
    others = FALLING ** np.arange(TOKENS - 1)
    probabilities = np.concatenate([best[..., None], (1 - best)[..., None] * others / others.sum()], -1)
    probabilities = -np.sort(-probabilities, -1)
    ranks = (probabilities.cumsum(-1) < lot[..., None]).sum(-1).clip(max=TOKENS - 1)
    labels = torch.from_numpy(np.where(inside, ranks, MISS).reshape(states, depth))
    logs = torch.from_numpy(np.log(probabilities).reshape(states, depth, TOKENS).astype(np.float32))
    nodes = Given(logs).true_nodes(torch.arange(states), labels, (MOST_WIDTH,))
    ranks = np.where(inside, ranks, NO_TRIAL).reshape(states, depth)
    return {"ranks": ranks.astype(np.int16), "marginal_places": nodes.numpy()}


def simulated() -> RankTrace:
    """A record of three widths on the same texts."""
    rng, shape = np.random.default_rng(0), (SEQUENCES, LENGTH)
    ease = rng.normal(0, 1.0, (SEQUENCES, 1)) + rng.normal(0, 2.0, shape)
    luck = rng.random(shape)
    blocks = {width: block_of(right, ease, luck) for width, right in RIGHT.items()}
    widest = max(blocks)
    kept = Counts(TOKENS, depth=widest, widths=(MOST_WIDTH,), narrower=tuple(sorted(blocks.keys() - {widest})))
    meta = {**kept.record, "num_heads": widest, "drafter": {"kind": "dflash", "num_heads": widest}}
    meta["provenance"] = {"model": "simulated guesses"}
    narrower = {f"{name}-{n}": of[name] for n, of in blocks.items() if n < widest for name in of}
    trace = RankTrace(starts=np.arange(SEQUENCES + 1) * LENGTH, **blocks[widest], narrower=narrower, meta=meta)
    trace.check()
    return trace


def write_figures(trace: RankTrace, folder: Path) -> list[Path]:
    """Both pictures as PNG files in a folder."""
    block = trace.at(trace.num_heads) if trace.widths else trace
    drawings = {"widths": draw(widths_chart(trace)), "ddtree": draw(ddtree_chart(block))}
    return [save(drawing, folder / f"{name}.png") for name, drawing in drawings.items()]


if __name__ == "__main__":
    images = Path(__file__).parent.parent / "docs" / "images"
    for path in write_figures(RunDirectory(Path(argv[1])).read_trace() if argv[1:] else simulated(), images):
        print(path)
