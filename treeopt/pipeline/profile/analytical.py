"""Profiles of what nobody timed: a device's roofline for a model's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treeopt.errors import Unsupported
from treeopt.files.provenance import Provenance
from treeopt.latency.devices import device_of
from treeopt.latency.model_shape import DTYPES, ITEMSIZE, shape_of
from treeopt.latency.roofline import analytical_profile
from treeopt.pipeline.profile.table import NUM_HEADS, calibrated_heads, check_unmeasured
from treeopt.records.inputs import inputs_of
from treeopt.records.profile import LatencyProfile
from treeopt.records.rundir import RunDirectory
from treeopt.report.terminal import note

CONTEXT = 512  # of computed steps


def profile_analytical(
    run: RunDirectory, device: str, model: str, *, num_heads: int | None = None, overwrite: bool = False, **steps: Any
) -> LatencyProfile:
    """Computed latencies as the run's profile; ``steps`` are the other options of `computed`.

    num_heads  of Medusa; by default as calibrated, else 4
    """
    if not overwrite:
        check_unmeasured(run)
    result = computed(device, model, num_heads=num_heads or calibrated_heads(run) or NUM_HEADS, **steps)
    result.save(run.profile)
    return result


def computed(
    device: str,
    model: str,
    *,
    batch_sizes: Sequence[int],
    contexts: Sequence[int] = (),
    sizes: Sequence[int] | None = None,
    budget: int = 64,
    dtype: str | None = None,
    num_heads: int = NUM_HEADS,
) -> LatencyProfile:
    """Latencies of all sizes up to ``budget``, or of ``sizes``, and notes of what they rest on.

    model  its config.json, a folder with one, or a name that `model_shape` knows
    """
    if dtype not in (None, *DTYPES):
        raise Unsupported(f"--analytical knows devices' speeds in {' and '.join(DTYPES)}, not in {dtype}.")
    found = device_of(device)
    shape, file, own = shape_of(model)
    contexts = contexts or (CONTEXT,)
    result = analytical_profile(
        shape,
        found,
        batch_sizes=batch_sizes,
        contexts=contexts,
        dtype=dtype or own or "bfloat16",
        sizes=sizes or range(2, budget + 1),
        num_heads=num_heads,
    )
    used: str = result.info["roofline"]["dtype"]
    result.info["provenance"] = Provenance(device=found.name, dtype=used).record() | {"machine": None}
    result.info["inputs"] = inputs_of(file) if file else {}
    note(f"Nothing was timed: latencies are a roofline of {found.name} for {shape.name}.")
    if not found.fitted:
        note(f"Efficiencies are those of the A100-80GB-PCIe, since no {found.name} was measured.")
    gigabytes = (shape.weights + max(batch_sizes) * max(contexts) * shape.cache_numbers) * ITEMSIZE / 1e9
    if found.memory_gb is not None and gigabytes > found.memory_gb:
        note(f"Weights and cache of {gigabytes:.0f} GB do not fit into the {found.memory_gb:g} GB of {found.name}.")
    return result
