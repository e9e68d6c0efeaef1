"""Open what a training run needs: devices, the base, the seed prompts."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from treeopt import demo
from treeopt.errors import InvalidInput, Unsupported
from treeopt.runtime.prompts.order import MOST_DRAWN, Order
from treeopt.runtime.prompts.sets import PromptSet, demo_prompts, load_prompts
from treeopt.runtime.target import Target, load_target
from treeopt.runtime.training.recipe import Recipe

LONGEST_WAIT = timedelta(hours=6)  # of a process for the answers that another one writes


def check_packages(recipe: Recipe, *, load_in_8bit: bool) -> None:
    """Raise Unsupported where a package or a device is missing, before anything is loaded."""
    packages = ("accelerate", "peft") if recipe.defaults.trains_base else ("accelerate",)
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    if absent:
        raise Unsupported(
            f"`kind={recipe.kind}` needs {' and '.join(absent)}. Install with: pip install {' '.join(absent)}"
        )
    if not load_in_8bit:
        return
    if recipe.defaults.trains_base:
        raise Unsupported(
            f"`load_in_8bit` is for a base that stays as it is, but {recipe.kind} trains it: leave it out."
        )
    if importlib.util.find_spec("bitsandbytes") is None or not torch.cuda.is_available():
        missing = "bitsandbytes is not installed" if torch.cuda.is_available() else "there is no CUDA device"
        raise Unsupported(
            f"`load_in_8bit` needs bitsandbytes and a CUDA device, but {missing}: leave it out, or install "
            "bitsandbytes with: pip install bitsandbytes"
        )


def open_accelerator(
    recipe: Recipe, *, device: str | None, dtype: str | None = None, mixed_precision: str | None = None
) -> Any:
    """accelerate's view of the devices; started by ``accelerate launch`` it is one process of several.

    Modules are placed by the caller, so that --device means here what it means elsewhere.
    """
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

    # While Medusa-2's heads learn alone, the base's adapter is no part of the loss.
    handlers = [
        InitProcessGroupKwargs(timeout=LONGEST_WAIT),
        DistributedDataParallelKwargs(find_unused_parameters=recipe.defaults.trains_base),
    ]
    cpu = device is not None and torch.device(device).type == "cpu"
    precision = wanted_precision(mixed_precision, device, dtype)
    return Accelerator(device_placement=False, mixed_precision=precision, cpu=cpu, kwargs_handlers=handlers)


def wanted_precision(given: str | None, device: str | None, dtype: str | None) -> str:
    """The precision that is given, here or to ``accelerate launch``; else bf16 for half precision on a CUDA device."""
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")  # it says "no" where the user said nothing
    if given or launched != "no" or dtype in ("float32", "float64"):
        return given or launched
    on_cuda = torch.cuda.is_available() and (device is None or torch.device(device).type == "cuda")
    return "bf16" if on_cuda and torch.cuda.is_bf16_supported() else "no"


def open_base(model: str, accelerator: Any, *, load_in_8bit: bool = False, **options: Any) -> Target:
    """The target that heads are trained for, on this process's device."""
    if options.get("device_map") is None and options.get("device") is None:
        options["device"] = str(accelerator.device)
    if load_in_8bit:
        from transformers import BitsAndBytesConfig

        options["quantization"] = BitsAndBytesConfig(load_in_8bit=True)
    return load_target(model, **options)


def open_seeds(target: Target, prompts: str | None, most: int, seed: int | None = 0, **options: Any) -> PromptSet:
    """The first ``most`` prompts to answer, in the seed's order, and given answers where ``responses`` names their column.

    The demo's are cut from the modules that the demo model was trained on, so that none of calibration's and
    bench's are among them.
    """
    if prompts is None or prompts == demo.NAME:
        if target.name != demo.TITLE:
            raise InvalidInput(
                "`prompts` is needed with a model of your own: heads learn from its answers to prompts like "
                "those that it will be asked."
            )
        if options:
            raise InvalidInput(f"`{sorted(options)[0]}` needs `prompts`: the demo's are plain text.")
        return demo_prompts(target, held_out=False, most=most, seed=seed)
    found = load_prompts(target, prompts, order=Order(seed, max(most, MOST_DRAWN)), **options)
    return replace(found, conversations=found.conversations[:most])
