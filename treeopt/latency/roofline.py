"""Latency of a decoding step, computed from a model's shape and a device's two roofs.

The hardware-aware analysis of Medusa (arXiv 2401.10774, appendix G): every operator takes as long as computing
or moving takes, whichever is longer. Its Table 5 counts each number that goes in or out once:

    (m, k) x (k, n)           2 m k n operations    m k + k n + m n numbers    a linear layer of m rows
    attention, of a head      4 q s d operations    2 q d + 2 s d numbers      QK^T and PV in one kernel

m  rows of a linear layer = batch size x tree size   q  queries = tree size x heads per key head
k, n  width in and out                               s  keys = context + tree size      d  head width

On the device that was fitted a matrix product is computed by tiles of TILE, dealt out to its units in waves; what is left
of a tile or of a wave is paid for. That is the staircase of the paper's Table 8. Products with few tiles are split
along k, as libraries do. Which tiles libraries take elsewhere is not known, so on other devices there are no stairs.

EFFICIENCY is fitted to the paper's Tables 6 to 8, one factor each for linear layers and attention. Starts of kernels are
left out: engines replay graphs, and their attention is one kernel that never writes its scores (FlashAttention, arXiv
2205.14135). No scheduling, sampling or Python is in a step either, so a step takes longer than this; how speedups err is not
known, plain steps are short too.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import NamedTuple

from treeopt.latency.hardware import ITEMSIZE, MEDUSA, Device, Drafting, ModelShape
from treeopt.records.profile import LatencyProfile, StepTiming

TILE = (128, 256)  # rows and columns: with 108 units the plateaus of Table 8 end where these tiles say
EFFICIENCY = {"linear": 0.796, "attention": 0.764}  # shares of the roofs that operators reach
MEASURES = "step (analytical)"


class Step(NamedTuple):
    """A decoding step of some sequences with trees of ``size`` rows and ``depth`` levels; of a plain step 1 and 0."""

    batch_size: int
    context_tokens: int
    size: int = 1
    depth: int = 0


@dataclass(frozen=True)
class Operator:
    """An operator of a step, ``times`` of which are run one after the other.

    kind    : "linear", "attention" or "elementwise"
    product : rows, inner and columns of a linear layer's matrix product
    """

    name: str
    kind: str
    flops: float
    moved_bytes: float
    times: int = 1
    product: tuple[int, int, int] | None = None

    @property
    def intensity(self) -> float:
        """Operations per byte moved [FLOP/byte]."""
        return self.flops / self.moved_bytes


def linear(name: str, rows: int, inner: int, columns: int, *, times: int = 1) -> Operator:
    """A linear layer.

    >>> round(linear("up", 16, 6656, 17920).intensity, 2)  # Medusa, Table 8
    15.95
    """
    moved = ITEMSIZE * (rows * inner + rows * columns + inner * columns)
    return Operator(name, "linear", 2 * rows * inner * columns, moved, times, (rows, inner, columns))


def decoder_operators(shape: ModelShape, step: Step) -> list[Operator]:
    """The layers of one pass over ``step.size`` rows of every sequence, without the lm_head."""
    rows, width, layers = step.batch_size * step.size, shape.width, shape.layers
    keys = step.context_tokens + step.size
    queries, values = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    # norms and residual sums; gate times up; rotations; keys and values into the cache
    moved = rows * (10 * width + 3 * shape.inner + 2 * (queries + values) + 2 * values)
    attended = 2 * rows * queries + 2 * step.batch_size * keys * values  # queries in, sums out, keys and values
    return [
        linear("qkv", rows, width, queries + 2 * values, times=layers),
        Operator("attention", "attention", 4 * rows * keys * queries, ITEMSIZE * attended, layers),
        linear("o", rows, queries, width, times=layers),
        Operator("elementwise", "elementwise", moved, ITEMSIZE * moved, layers),
        linear("gate", rows, width, shape.inner, times=layers),
        linear("up", rows, width, shape.inner, times=layers),
        linear("down", rows, shape.inner, width, times=layers),
    ]


def draft_operators(shape: ModelShape, drafter: Drafting, step: Step) -> list[Operator]:
    """Operators that draft the tree of a step. Every level below the root has an equal share of the nodes.

    Medusa's heads all read the root's state, so they are one level.
    """
    if drafter.kind == "ngram":
        return []
    at_root = step.depth if drafter.kind == "medusa" else min(step.depth, 1)
    share = -(-(step.size - 1) // max(step.depth, 1))
    levels = ((1, at_root), (share, step.depth - at_root))  # nodes, and how many levels have so many
    return [
        replace(operator, times=operator.times * times)
        for nodes, times in levels
        for operator in level_operators(drafter.shape or shape, drafter.kind, step._replace(size=nodes))
        if times
    ]


def level_operators(shape: ModelShape, kind: str, level: Step) -> list[Operator]:
    """Operators that draft one level below ``level.size`` nodes, by the shape of the layers that draft.

    Medusa and Hydra heads are a residual block and an lm_head each; EAGLE's and MTP's layers and draft models run once a level.
    """
    rows, width = level.batch_size * level.size, shape.width
    if kind in ("medusa", "hydra"):
        guesses = 0 if kind == "medusa" else (level.depth + 1) // 2  # the mean number of those that a head reads
        operators = [linear("head block", rows, width * (1 + guesses), width)]
    else:
        operators = decoder_operators(shape, level)
    if kind in ("eagle", "eagle3", "mtp"):  # state and embedding are joined
        operators.append(linear("fc", rows, 2 * width, width))
    return [*operators, linear("head lm_head", rows, width, shape.vocab_size)]


def step_operators(shape: ModelShape, step: Step, drafter: Drafting = MEDUSA) -> list[Operator]:
    """All operators of one step."""
    return [
        *decoder_operators(shape, step),
        linear("lm_head", step.batch_size * step.size, shape.width, shape.vocab_size),
        *draft_operators(shape, drafter, step),
    ]


def compute_us(operator: Operator, device: Device) -> float:
    """Time to compute an operator at the peak [us]; partly filled tiles and waves are paid for where they are known.

    >>> device = Device("toy", tflops=1.0, tb_per_s=1.0, units=2)
    >>> wave = compute_us(linear("", 1, 8, 512), device)  # two tiles on two units
    >>> [compute_us(linear("", rows, 8, 512), device) / wave for rows in (128, 129, 256, 257)]
    [1.0, 2.0, 2.0, 3.0]
    """
    if operator.product is None or device.units is None:
        return operator.flops / device.tflops / 1e6
    rows, inner, columns = operator.product
    down, across = -(-rows // TILE[0]), -(-columns // TILE[1])
    splits = max(1, device.units // (down * across))
    waves = -(-down * across * splits // device.units)
    return waves * 2 * TILE[0] * TILE[1] * (inner / splits) * device.units / device.tflops / 1e6


def peak_us(operator: Operator, device: Device) -> float:
    """How long an operator takes at the roofs [us], once."""
    return max(compute_us(operator, device), operator.moved_bytes / device.tb_per_s / 1e6)


def operator_us(operator: Operator, device: Device) -> float:
    """How long an operator takes [us], once. Elementwise operators are as efficient as linear layers."""
    return peak_us(operator, device) / EFFICIENCY.get(operator.kind, EFFICIENCY["linear"])


def step_ms(shape: ModelShape, device: Device, step: Step, drafter: Drafting = MEDUSA) -> float:
    """Time of one whole step [ms]: its `step_operators`, one after the other."""
    return sum(op.times * operator_us(op, device) for op in step_operators(shape, step, drafter)) / 1e3


def analytical_profile(
    shape: ModelShape,
    device: Device,
    *,
    batch_sizes: Sequence[int],
    contexts: Sequence[int],
    sizes: Sequence[int],
    num_heads: int,
    dtype: str = "bfloat16",
    drafter: Drafting = MEDUSA,
) -> LatencyProfile:
    """Computed latencies of all ``sizes`` at every depth that they allow, and of plain steps.

    A tree of depth d takes d levels of drafting.
    """

    def timing(step: Step) -> StepTiming:
        return StepTiming(*step, (round(step_ms(shape, device, step, drafter), 6),))

    settings = list(product(sorted(set(batch_sizes)), sorted(set(contexts))))
    trees = [(size, depth) for size in sorted(set(sizes)) for depth in range(1, min(num_heads, size - 1) + 1)]
    points = [timing(Step(*setting, *tree)) for setting in settings for tree in trees]
    plain = [timing(Step(*setting)) for setting in settings]
    assumed = {"device": asdict(device), "model": asdict(shape), "dtype": dtype, "num_heads": num_heads}
    assumed |= {"drafter": asdict(drafter), "efficiency": EFFICIENCY, "tile": list(TILE)}
    info = {"measures": MEASURES, "roofline": assumed}
    return LatencyProfile(tuple(points), tuple(plain), {"name": f"roofline of {device.name}, nothing measured"}, info)
