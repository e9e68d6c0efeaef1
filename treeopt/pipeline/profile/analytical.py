"""Profiles of what nobody timed: a device's roofline for a model's shape."""

from __future__ import annotations

from typing import Any

from treeopt.errors import InvalidInput, Unsupported
from treeopt.files.provenance import Provenance
from treeopt.latency.hardware import DTYPES, ITEMSIZE, device_of, shape_of
from treeopt.latency.roofline import MEASURES, analytical_profile
from treeopt.pipeline.profile.placement import Wanted
from treeopt.pipeline.profile.table import NUM_HEADS, calibrated_heads
from treeopt.records.inputs import inputs_of
from treeopt.records.profile import LatencyProfile
from treeopt.records.rundir import RunDirectory
from treeopt.report.terminal import note

CONTEXT = 512  # of computed steps


def profile_analytical(
    run: RunDirectory,
    device: str,
    model: str,
    *,
    num_heads: int | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    **options: Any,
) -> LatencyProfile:
    """Computed latencies of all sizes as the run's profile, and notes of what they rest on.

    model      its config.json, a folder with one, or a name that `model_shape` knows
    num_heads  of Medusa; by default as calibrated, else 4
    options    those of `Wanted`: batch_sizes, contexts, sizes, budget
    """
    wanted = Wanted(**options)
    if run.profile.exists() and not overwrite and run.read_profile().info.get("measures") != MEASURES:
        raise InvalidInput(
            f"A measured profile is not replaced by a computed one unasked, but {run.profile} is one: pass another `run`, "
            "or `overwrite`."
        )
    if dtype not in (None, *DTYPES):
        raise Unsupported(f"`analytical` knows devices' speeds in {' and '.join(DTYPES)}, not in {dtype}.")
    found = device_of(device)
    shape, file, own = shape_of(model)
    batch_sizes, contexts = wanted.batch_sizes, wanted.contexts or (CONTEXT,)
    result = analytical_profile(
        shape,
        found,
        batch_sizes=batch_sizes,
        contexts=contexts,
        dtype=dtype or own or "bfloat16",
        sizes=wanted.sizes or range(2, wanted.budget + 1),
        num_heads=num_heads or calibrated_heads(run) or NUM_HEADS,
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
    result.save(run.profile)
    return result
