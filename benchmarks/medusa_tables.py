"""Speeds of operators as the Medusa paper measured them (arXiv 2401.10774, ICML 2024, Tables 6 to 8) [TFLOP/s].

Llama-33B in float16 on an A100-80GB PCIe; CANDIDATES are the tree's rows. Tables 6 and 7 are an attention
product (52 heads, 128 wide), Table 8 a linear layer (up, gate or down, 6656 x 17920).
"""

from __future__ import annotations

from treeopt.latency.hardware import DEVICES, ITEMSIZE, SHAPES, Device
from treeopt.latency.roofline import EFFICIENCY, Operator, linear, peak_us

SOURCE = "Medusa (arXiv 2401.10774), Tables 6-8"
DEVICE: Device = DEVICES["A100-80GB-PCIe"]
SHAPE = SHAPES["llama-33b"]
CANDIDATES = (1, 16, 32, 48, 64, 80, 96, 112)
KEYS = {6: "keys", 7: "batch size", 8: "batch size"}
BATCH_SIZE, CONTEXT = 16, 1024  # of Table 6 and of Table 7
START_US = 32.5  # that an attention kernel of the paper takes to begin, fitted

TFLOPS: dict[int, dict[int, tuple[float, ...]]] = {
    6: {
        128: (0.54, 7.87, 14.73, 19.78, 25.25, 28.63, 32.58, 36.57),
        256: (0.75, 11.2, 21.29, 28.69, 36.59, 41.2, 45.99, 52.33),
        512: (1.02, 14.69, 27.47, 37.35, 47.09, 52.24, 59.55, 66.35),
        1024: (1.24, 17.42, 32.15, 43.89, 54.8, 60.19, 68.28, 75.45),
        2048: (1.39, 19.03, 35.05, 48.03, 59.66, 63.91, 72.83, 80.05),
        4096: (1.48, 19.8, 36.59, 50.4, 62.29, 65.84, 74.86, 82.06),
        8192: (1.53, 20.08, 36.89, 50.44, 62.11, 67.5, 76.97, 84.5),
    },
    7: {
        1: (0.37, 5.22, 10.15, 15.02, 19.79, 21.52, 25.65, 29.4),
        2: (0.54, 8.25, 16.0, 21.62, 28.24, 31.84, 37.49, 43.04),
        4: (0.75, 11.41, 21.97, 30.02, 38.71, 43.41, 50.06, 56.77),
        8: (1.02, 14.78, 27.78, 38.09, 47.99, 53.32, 61.0, 68.11),
        16: (1.24, 17.42, 32.15, 43.89, 54.8, 60.19, 68.28, 75.45),
        32: (1.39, 18.89, 34.67, 47.57, 58.89, 63.61, 72.17, 79.21),
        64: (1.48, 19.58, 35.87, 49.45, 61.13, 64.84, 73.73, 81.02),
    },
    8: {
        1: (1.26, 19.95, 39.69, 58.4, 76.57, 94.4, 111.91, 128.64),
        2: (2.51, 39.66, 76.53, 112.05, 145.73, 130.67, 129.1, 148.56),
        4: (5.03, 76.44, 145.8, 128.85, 167.85, 201.19, 236.93, 195.91),
        8: (10.06, 145.72, 168.26, 236.83, 221.11, 207.79, 236.95, 227.8),
        16: (19.96, 168.35, 221.41, 237.5, 224.71, 232.49, 241.12, 229.25),
        32: (39.69, 221.74, 224.88, 241.33, 239.02, 245.83, 243.55, 240.33),
        64: (76.57, 225.19, 239.2, 243.26, 246.16, 246.91, 244.52, 246.14),
    },
}


# Whole steps at batch size 1: plain ones in tokens per second (Table 4, AlpacaEval), the overhead of 64 rows and Medusa-2's
# heads (Table 1, MT-Bench), and steps of 64 rows and Medusa-1's heads in ms (medians of three runs in the code's repository).
STEPS = {"llama-7b": (37.07, 1.22, 25.3), "llama-13b": (29.01, 1.23, 35.5), "llama-33b": (17.87, 1.27, 68.6)}


def attention_product(name: str, groups: int, queries: int, keys: int, width: int, *, times: int = 1) -> Operator:
    """QK^T or PV, of ``groups`` key heads with so many queries each.

    >>> round(attention_product("QK^T", 1, 64, 1024, 128).intensity, 2)  # Medusa, Table 6
    40.96
    """
    # its Table 5: (q, d) x (d, s), every number that goes in or out once
    moved = queries * width + keys * width + queries * keys
    return Operator(name, "attention", 2 * groups * queries * keys * width, ITEMSIZE * groups * moved, times)


def operator_of(table: int, key: int, candidates: int) -> Operator:
    """The operator of a cell; ``key`` is the row's number of keys (Table 6) or batch size (7, 8).

    >>> round(operator_of(8, 64, 112).intensity, 2)
    2893.91
    """
    if table == 8:
        return linear("up", key * candidates, SHAPE.width, SHAPE.inner)
    batch_size, keys = (BATCH_SIZE, key) if table == 6 else (key, CONTEXT)
    return attention_product("QK^T", batch_size * SHAPE.heads, candidates, keys, SHAPE.head_width)


def predicted_tflops(
    operator: Operator, device: Device = DEVICE, share: float | None = None, start_us: float = START_US
) -> float:
    """What the roofline says that an operator reaches [TFLOP/s]; ``share`` of the roofs, by default as fitted."""
    begin = start_us if operator.kind == "attention" else 0.0
    return operator.flops / (begin + peak_us(operator, device) / (share or EFFICIENCY[operator.kind])) / 1e6
