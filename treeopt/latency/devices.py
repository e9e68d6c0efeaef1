"""Accelerators by name: what their makers say that they compute and read per second.

tflops    dense products in bfloat16 or float16 with float32 sums, no sparsity [TFLOP/s]
tb_per_s  memory bandwidth [TB/s]
units     what tiles of a product are dealt out to: streaming multiprocessors, compute units
fitted    whether efficiencies were fitted to measurements on it (`roofline.EFFICIENCY`); the others borrow them
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from treeopt.errors import InvalidInput


@dataclass(frozen=True)
class Device:
    """The two roofs of an accelerator."""

    name: str
    tflops: float
    tb_per_s: float
    units: int | None = None
    memory_gb: float | None = None
    source: str | None = None
    fitted: bool = False

    @property
    def ridge(self) -> float:
        """Operations per byte [FLOP/byte] above which it is computing that takes the time.

        >>> round(DEVICES["A100-80GB-PCIe"].ridge, 1)
        161.2
        """
        return self.tflops / self.tb_per_s


DEVICES = {
    device.name: device
    for device in (
        Device("A100-80GB-PCIe", 312, 1.935, 108, 80, "NVIDIA A100 datasheet, 2021", fitted=True),
        Device("A100-80GB-SXM", 312, 2.039, 108, 80, "NVIDIA A100 datasheet, 2021"),
        Device("A100-40GB-SXM", 312, 1.555, 108, 40, "NVIDIA A100 datasheet, 2020"),
        Device("H100-SXM", 989.4, 3.35, 132, 80, "NVIDIA H100 datasheet, half of the sparse figure"),
        Device("H100-PCIe", 756, 2.0, 114, 80, "NVIDIA H100 datasheet, half of the sparse figure"),
        Device("H200-SXM", 989.4, 4.8, 132, 141, "NVIDIA H200 datasheet, half of the sparse figure"),
        Device("L40S", 362.05, 0.864, 142, 48, "NVIDIA L40S datasheet"),
        Device("L4", 121, 0.3, 58, 24, "NVIDIA L4 datasheet, half of the sparse figure"),
        Device("A10G", 70, 0.6, 80, 24, "NVIDIA A10G datasheet"),
        Device("RTX-4090", 165.2, 1.008, 128, 24, "NVIDIA Ada GPU architecture white paper, appendix A"),
        Device("MI300X", 1307.4, 5.3, 304, 192, "AMD Instinct MI300X datasheet"),
    )
}


def device_of(text: str) -> Device:
    """A device by its name, or any by its two roofs, "312:1.935" [TFLOP/s:TB/s].

    >>> device_of("312:2").ridge
    156.0
    """
    known = {name.lower(): device for name, device in DEVICES.items()}
    if text.lower() in known:
        return known[text.lower()]
    try:
        tflops, tb_per_s = map(float, text.split(":"))
    except ValueError:
        tflops = tb_per_s = math.nan
    if not (0 < tflops < math.inf and 0 < tb_per_s < math.inf):
        raise InvalidInput(
            f"--analytical must be one of {', '.join(DEVICES)}, or TFLOPS:TB_PER_S such as 312:1.935, but got {text!r}."
        )
    return Device(f"{tflops:g} TFLOP/s, {tb_per_s:g} TB/s", tflops, tb_per_s)
