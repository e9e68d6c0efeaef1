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

EFFICIENCY is fitted to the paper's Tables 6 to 8, one factor each for linear layers and attention. The start
is a fitted constant of the paper's separate attention kernels. Steps leave it out: engines replay graphs, and their
attention is one kernel that never writes its scores (FlashAttention, arXiv 2205.14135). No scheduling, sampling or Python
is in a step either, so a step takes longer than this; how speedups err is not known, plain steps are short too.

Experts: r rows that take k of E each read E (1 - (1 - k/E)^r) of them, if each expert is as likely. Weights may take fewer
bits than numbers; they are computed at the same speed. On several devices each has its part of every layer,
and adds up rows x width numbers twice a layer with the others: 2 (n - 1) / n of their bytes go over its link.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from treeopt.latency.hardware import ITEMSIZE, MEDUSA, Device, Drafting, ModelShape
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
    kind: str  # "linear", "attention", "elementwise", "link"
    flops: float
    moved_bytes: float
    times: int = 1
    product: tuple[int, int, int] | None = None

    @property
    def intensity(self) -> float:
        """Operations per byte moved [FLOP/byte]."""
        return self.flops / self.moved_bytes


def linear(
    name: str, rows: int, inner: int, columns: int, *, times: int = 1, weight_bytes: float = ITEMSIZE
) -> Operator:
    """A linear layer; its weights take ``weight_bytes`` each.

    >>> round(linear("up", 16, 6656, 17920).intensity, 2)  # Medusa, Table 8
    15.95
    """
    moved = ITEMSIZE * (rows * inner + rows * columns) + weight_bytes * inner * columns
    return Operator(name, "linear", 2 * rows * inner * columns, moved, times, (rows, inner, columns))


def experts_read(experts: int, each: int, rows: int) -> float:
    """Expected number of different experts that rows read, of which ``each`` are taken by a row, all as likely.

    >>> [round(experts_read(8, 2, rows), 2) for rows in (1, 2, 4, 64)]
    [2.0, 3.5, 5.47, 8.0]
    """
    return experts * (1 - (1 - each / experts) ** rows)


def decoder_operators(shape: ModelShape, *, batch_size: int, size: int, context_tokens: int) -> list[Operator]:
    """The layers of one pass over ``size`` rows of every sequence, without the lm_head."""
    rows, width, layers, devices = batch_size * size, shape.width, shape.layers, shape.devices
    keys = min(context_tokens, shape.window or context_tokens) + size
    heads, kv_heads = shape.heads // devices, max(1, shape.kv_heads // devices)
    queries, values = heads * shape.head_width, kv_heads * shape.head_width
    sparse = min(shape.sparse_layers, layers)

    def layer(name: str, inner: int, columns: int, times: int = layers) -> Operator:
        return linear(name, rows, inner, columns, times=times, weight_bytes=shape.weight_bytes)

    # norms and residual sums; gate times up; rotations; keys and values into the cache
    moved = rows * (10 * width + 3 * shape.inner // devices + 2 * (queries + values) + 2 * values)
    attended = batch_size * (2 * size * queries + 2 * keys * values)  # queries in, sums out, keys and values
    found = [
        layer("qkv", width, queries + 2 * values),
        Operator("attention", "attention", 4 * rows * keys * queries, ITEMSIZE * attended, layers),
        layer("o", queries, width),
        Operator("elementwise", "elementwise", moved, ITEMSIZE * moved, layers),
    ]
    for name, inner, times in (("", shape.inner, layers - sparse), ("shared ", shape.shared_inner, sparse)):
        part = -(-inner // devices)
        if part and times:
            found += [layer(f"{name}{which}", width, part, times) for which in ("gate", "up")]
            found.append(layer(f"{name}down", part, width, times))
    if sparse:
        weights = 3 * width * shape.expert_inner / devices
        taken = experts_read(shape.experts, shape.experts_per_token, rows)
        numbers = rows * shape.experts_per_token * (2 * width + 3 * shape.expert_inner / devices)
        flops = 2 * rows * shape.experts_per_token * weights
        moved_bytes = shape.weight_bytes * taken * weights + ITEMSIZE * numbers
        found.append(Operator("experts", "linear", flops, moved_bytes, sparse))
    if devices > 1:
        added = 2 * (devices - 1) / devices * ITEMSIZE * rows * width
        found.append(Operator("all-reduce", "link", 0.0, added, 2 * layers))
    return found


def draft_operators(
    shape: ModelShape, drafter: Drafting, *, batch_size: int, size: int, context_tokens: int, depth: int
) -> list[Operator]:
    """Operators that draft a tree of ``depth`` levels: below the root a level has its share of the nodes.

    Medusa and Hydra heads are a residual block and an lm_head each; EAGLE's and MTP's layers and draft models run once a level.
    """
    kind, own = drafter.kind, drafter.shape or shape
    width, found = own.width, list[Operator]()
    vocabulary = -(-own.vocab_size // own.devices)
    below_root = depth if kind == "medusa" else min(depth, 1)  # Medusa's heads all read the root's state
    for nodes, times in ((1, below_root), (-(-(size - 1) // max(depth, 1)), depth - below_root)):
        rows = batch_size * nodes
        if kind == "ngram" or not times:
            continue
        if kind in ("medusa", "hydra", "hydra++"):
            inner = (
                width if kind == "medusa" else width * (1 + (depth + 1) // 2)
            )  # Hydra's read the guesses before, too
            passed = [linear("head block", rows, inner, width)]
        else:
            passed = decoder_operators(own, batch_size=batch_size, size=nodes, context_tokens=context_tokens)
        if kind in ("eagle", "eagle3", "mtp"):  # state and embedding are joined
            passed.append(linear("fc", rows, 2 * width, width, weight_bytes=own.weight_bytes))
        passed.append(linear("head lm_head", rows, width, vocabulary))
        found += [replace(op, times=op.times * times) for op in passed]
    return found


def step_operators(
    shape: ModelShape,
    *,
    batch_size: int,
    size: int,
    context_tokens: int,
    num_heads: int = 0,
    drafter: Drafting = MEDUSA,
) -> list[Operator]:
    """All operators of one step with a tree of ``size`` rows and ``num_heads`` levels; a plain step has size 1 and none."""
    pass_of = {"batch_size": batch_size, "size": size, "context_tokens": context_tokens}
    return [
        *decoder_operators(shape, **pass_of),
        linear("lm_head", batch_size * size, shape.width, -(-shape.vocab_size // shape.devices)),
        *draft_operators(shape, drafter, **pass_of, depth=num_heads),
    ]


def compute_us(operator: Operator, device: Device) -> float:
    """Time to compute an operator at the peak [us]; partly filled tiles and waves are paid for where they are known.

    >>> device = Device("toy", tflops=1.0, tb_per_s=1.0, units=2, fitted=True)
    >>> one = compute_us(linear("", 1, 8, 512), device)  # two tiles on two units: one wave
    >>> [compute_us(linear("", rows, 8, 512), device) / one for rows in (128, 129, 256, 257)]
    [1.0, 2.0, 2.0, 3.0]
    """
    if operator.product is None or not device.fitted or device.units is None:
        return operator.flops / device.tflops / 1e6
    rows, inner, columns = operator.product
    down, across = -(-rows // TILE[0]), -(-columns // TILE[1])
    splits = max(1, device.units // (down * across))
    waves = -(-down * across * splits // device.units)
    return waves * 2 * TILE[0] * TILE[1] * (inner / splits) * device.units / device.tflops / 1e6


def operator_us(
    operator: Operator, device: Device, efficiency: Efficiency = EFFICIENCY, *, start: bool = False
) -> float:
    """How long an operator takes [us], once; with ``start`` what an attention kernel takes to begin, too."""
    if operator.kind == "link":
        return operator.moved_bytes / device.link_gb_per_s / 1e3
    share = efficiency.attention if operator.kind == "attention" else efficiency.linear
    moving = operator.moved_bytes / device.tb_per_s / 1e6
    begin = efficiency.start_us if start and operator.kind == "attention" else 0.0
    return begin + max(compute_us(operator, device), moving) / share


def step_ms(shape: ModelShape, device: Device, **asked: Any) -> float:
    """Time of one whole step [ms]: its `step_operators`, one after the other."""
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
    drafter: Drafting = MEDUSA,
) -> LatencyProfile:
    """Computed latencies of all ``sizes`` at every depth that they allow, and of plain steps.

    A tree of depth d takes d levels of drafting.
    """

    def timing(batch_size: int, context: int, size: int, depth: int) -> StepTiming:
        ms = step_ms(
            shape, device, batch_size=batch_size, size=size, context_tokens=context, num_heads=depth, drafter=drafter
        )
        return StepTiming(batch_size, context, size, depth, (round(ms, 6),))

    settings = list(product(sorted(set(batch_sizes)), sorted(set(contexts))))
    trees = [(size, depth) for size in sorted(set(sizes)) for depth in range(1, min(num_heads, size - 1) + 1)]
    points = [timing(*setting, *tree) for setting in settings for tree in trees]
    plain = [timing(*setting, 1, 0) for setting in settings]
    assumed = {"device": asdict(device), "model": asdict(shape), "dtype": dtype, "num_heads": num_heads}
    assumed["drafter"] = asdict(drafter)
    info = {"measures": MEASURES, "roofline": {**assumed, "efficiency": asdict(EFFICIENCY), "tile": list(TILE)}}
    return LatencyProfile(tuple(points), tuple(plain), {"name": f"roofline of {device.name}, nothing measured"}, info)
