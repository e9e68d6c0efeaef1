"""torch.compile for the target's decoder, so that a profile can be of a compiled runtime."""

from __future__ import annotations

import os
import shutil

import torch

from treeopt.errors import Unsupported
from treeopt.runtime.target import Target

COMPILERS = ("g++", "clang++", "c++")  # one of which inductor needs on a CPU, unless $CXX names another
MOST_GRAPHS = 64  # of one decoder: plain and tree steps, even and ragged rows, prefills


def compile_target(target: Target) -> None:
    """Replace the decoder by its compiled form; on CUDA its kernels are replayed as CUDA graphs.

    The text stays the same up to rounding. Each kind of step is compiled when it first comes, and again
    where a number that was taken for fixed turns out to vary; with CUDA graphs every new shape is recorded
    anew. Raises Unsupported on a CPU without a C++ compiler.
    """
    on_cuda = target.device.type == "cuda"
    if not on_cuda and not any(map(shutil.which, filter(None, (os.environ.get("CXX"), *COMPILERS)))):
        raise Unsupported(
            f"`compiled` needs a C++ compiler on a CPU ({', '.join(COMPILERS)} or $CXX), but there is none."
        )
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
    target.decoder = torch.compile(target.decoder, mode="reduce-overhead" if on_cuda else None)
    target.compiled = True


def uses_cuda_graphs(target: Target) -> bool:
    """Whether a compiled target's kernels are replayed as CUDA graphs; inductor leaves out what it cannot record."""
    return (
        target.compiled
        and target.device.type == "cuda"
        and not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    )


def compiled_note(target: Target) -> str:
    """A sentence on what torch.compile did in this process."""
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    skipped = target.device.type == "cuda" and not uses_cuda_graphs(target)
    return f"torch.compile made {graphs} graphs of the target" + (
        ", and CUDA graphs of not all of them: the profile says that there were none." if skipped else "."
    )
