"""Latency of a decoding step, computed from a model's shape and a device's two roofs.

The hardware-aware analysis of Medusa (arXiv 2401.10774, appendix G): every operator takes as long as computing
or moving takes, whichever is longer. Its Table 5 counts each number that goes in or out once:

    (m, k) x (k, n)           2 m k n operations    m k + k n + m n numbers    a linear layer of m rows
    (q, d) x (d, s), a head   2 q s d operations    q d + s d + q s numbers    QK^T, and PV likewise

m  rows of a linear layer = batch size x tree size   q  queries = tree size x heads per key head
k, n  width in and out                               s  keys = context + tree size      d  head width

A matrix product is computed by tiles of TILE, dealt out to the device's units in waves; what is left of a
tile or of a wave is paid for. That is the staircase of the paper's Table 8. Products with few tiles are
split along k, as libraries do.

EFFICIENCY is fitted to the paper's Tables 6 to 8, one factor each for linear layers and attention. The start
is a fitted constant of the paper's separate attention kernels. Steps leave it out: engines fuse those kernels
and replay graphs. So no communication, scheduling, sampling or Python is in a step either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product

from treeopt.latency.hardware import ITEMSIZE, Device, ModelShape
from treeopt.records.profile import LatencyProfile, StepTiming

TILE = (128, 256)  # rows and columns: with 108 units the plateaus of Table 8 end where these tiles say
MEASURES = "step (analytical)"


@dataclass(frozen=True)
class Efficiency:
    """Shares of the roofs that operators reach, and what an attention kernel takes to start."""

    linear: float
    attention: float
    start_us: float


EFFICIENCY = Efficiency(linear=0.796, attention=0.764, start_us=32.5)


@dataclass(frozen=True)
class Operator:
    """An operator of a step, ``times`` of which are run one after the other.

    product  rows, inner and columns of a linear layer's matrix product
    """

    name: str
    kind: str  # "linear", "attention", "elementwise"
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
    moved = rows * inner + inner * columns + rows * columns
    return Operator(name, "linear", 2 * rows * inner * columns, ITEMSIZE * moved, times, (rows, inner, columns))


def attention_product(name: str, groups: int, queries: int, keys: int, width: int, *, times: int = 1) -> Operator:
    """QK^T or PV, of ``groups`` key heads with so many queries each.

    >>> round(attention_product("QK^T", 1, 64, 1024, 128).intensity, 2)  # Medusa, Table 6
    40.96
    """
    moved = queries * width + keys * width + queries * keys
    return Operator(name, "attention", 2 * groups * queries * keys * width, ITEMSIZE * groups * moved, times)


def step_operators(
    shape: ModelShape, *, batch_size: int, size: int, context_tokens: int, num_heads: int = 0
) -> list[Operator]:
    """All operators of one step with a tree of ``size`` rows that ``num_heads`` Medusa heads guessed for.

    A plain step is of size 1 without heads. Heads have a residual block and a projection each, and read one
    row per sequence, the last accepted one.
    """
    rows, width, layers = batch_size * size, shape.width, shape.layers
    keys = min(context_tokens, shape.window or context_tokens) + size
    queries, values = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    groups, group = batch_size * shape.kv_heads, size * (shape.heads // shape.kv_heads)
    scores = batch_size * shape.heads * size * keys
    # norms and residual sums; gate times up; rotations; keys and values into the cache
    moved = rows * (10 * width + 3 * shape.inner + 2 * (queries + values) + 2 * values)

    def layer(name: str, inner: int, columns: int) -> Operator:
        return linear(name, rows, inner, columns, times=layers)

    found = [
        layer("qkv", width, queries + 2 * values),
        attention_product("QK^T", groups, group, keys, shape.head_width, times=layers),
        Operator("softmax", "elementwise", 5 * scores, ITEMSIZE * 2 * scores, layers),
        attention_product("PV", groups, group, keys, shape.head_width, times=layers),
        layer("o", queries, width),
        layer("gate", width, shape.inner),
        layer("up", width, shape.inner),
        layer("down", shape.inner, width),
        Operator("elementwise", "elementwise", moved, ITEMSIZE * moved, layers),
        linear("lm_head", rows, width, shape.vocab_size),
    ]
    if num_heads:
        found += [
            linear("head block", batch_size, width, width, times=num_heads),
            linear("head lm_head", batch_size, width, shape.vocab_size, times=num_heads),
        ]
    return found


def compute_us(operator: Operator, device: Device) -> float:
    """Time to compute an operator at the peak [us], partly filled tiles and waves paid for in full.

    >>> device = Device("toy", tflops=1.0, tb_per_s=1.0, units=2)
    >>> one = compute_us(linear("", 1, 8, 512), device)  # two tiles on two units: one wave
    >>> [compute_us(linear("", rows, 8, 512), device) / one for rows in (128, 129, 256, 257)]
    [1.0, 2.0, 2.0, 3.0]
    """
    if operator.product is None:
        return operator.flops / device.tflops / 1e6
    rows, inner, columns = operator.product
    down, across = -(-rows // TILE[0]), -(-columns // TILE[1])
    if device.units is None:
        return 2 * down * TILE[0] * inner * columns / device.tflops / 1e6
    splits = max(1, device.units // (down * across))
    waves = -(-down * across * splits // device.units)
    return waves * 2 * TILE[0] * TILE[1] * (inner / splits) * device.units / device.tflops / 1e6


def operator_us(
    operator: Operator, device: Device, efficiency: Efficiency = EFFICIENCY, *, start: bool = False
) -> float:
    """How long an operator takes [us], once; with ``start`` what an attention kernel takes to begin, too."""
    share = efficiency.attention if operator.kind == "attention" else efficiency.linear
    moving = operator.moved_bytes / device.tb_per_s / 1e6
    begin = efficiency.start_us if start and operator.kind == "attention" else 0.0
    return begin + max(compute_us(operator, device), moving) / share


def step_ms(
    shape: ModelShape, device: Device, *, batch_size: int, size: int, context_tokens: int, num_heads: int = 0
) -> float:
    """Time of one whole step [ms]: its operators, one after the other."""
    asked = {"batch_size": batch_size, "size": size, "context_tokens": context_tokens, "num_heads": num_heads}
    return sum(op.times * operator_us(op, device) for op in step_operators(shape, **asked)) / 1e3


def analytical_profile(
    shape: ModelShape,
    device: Device,
    *,
    batch_sizes: Sequence[int],
    contexts: Sequence[int],
    sizes: Sequence[int],
    num_heads: int,
    dtype: str = "bfloat16",
) -> LatencyProfile:
    """Computed latencies of all ``sizes`` at every depth that they allow, and of plain steps.

    A tree of depth d uses d heads.
    """

    def timing(batch_size: int, context: int, size: int, depth: int) -> StepTiming:
        ms = step_ms(shape, device, batch_size=batch_size, size=size, context_tokens=context, num_heads=depth)
        return StepTiming(batch_size, context, size, depth, (round(ms, 6),))

    settings = list(product(sorted(set(batch_sizes)), sorted(set(contexts))))
    trees = [(size, depth) for size in sorted(set(sizes)) for depth in range(1, min(num_heads, size - 1) + 1)]
    points = [timing(*setting, *tree) for setting in settings for tree in trees]
    plain = [timing(*setting, 1, 0) for setting in settings]
    assumed = {"device": asdict(device), "model": asdict(shape), "dtype": dtype, "num_heads": num_heads}
    info = {"measures": MEASURES, "roofline": {**assumed, "efficiency": asdict(EFFICIENCY), "tile": list(TILE)}}
    return LatencyProfile(tuple(points), tuple(plain), {"name": f"roofline of {device.name}, nothing measured"}, info)
