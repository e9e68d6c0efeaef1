"""Ranks: the processes that share one target, each with a part of every layer (tensor parallelism).

All of them run the same command and decode the same, so that all come to the same collectives in the same order: what
they decide by may depend on nothing that only one of them knows (`treeopt.runtime.clock`). Which weights are divided is
transformers' own plan. The embedding and the lm_head stay whole on every rank, since drafters read them, and hidden
states are whole on all: so drafters and rules know nothing of ranks.

Without ranks there is one, this process.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn

from treeopt.errors import InvalidInput, Unsupported

PATIENCE = timedelta(minutes=30)  # that ranks wait for one that lives but does not come


def count() -> int:
    """How many ranks there are."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def join() -> None:
    """Become one of the ranks that the environment names, as torchrun sets it. Raises InvalidInput for too few GPUs."""
    if torch.cuda.is_available():
        place, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if place >= there:
            raise InvalidInput(
                f"--tensor-parallel needs a GPU for each process of a machine, but this one has {there}."
            )
        torch.cuda.set_device(place)
    distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // count()))


def leave() -> None:
    """Stop being one of them."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def wait() -> None:
    """Go on when all ranks are here."""
    if count() > 1:
        distributed.all_reduce(torch.zeros(1))


def greatest(number: float) -> float:
    """The largest of the ranks' numbers, the same on all."""
    if count() == 1:
        return number
    shared = torch.tensor([number], dtype=torch.float64)
    distributed.all_reduce(shared, distributed.ReduceOp.MAX)
    return float(shared)


def is_of_ranks(error: BaseException) -> bool:
    """Whether an error says that another rank has gone."""
    return isinstance(error, distributed.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )


def described(device: torch.device) -> str:
    """A device, or as many of its kind as there are ranks, for the record."""
    return str(device) if count() == 1 else f"{count()} x {device.type}"


def check_divisible(config: Any, name: str) -> None:
    """Raise Unsupported where transformers does not know how to divide a model, and InvalidInput where heads do not go up."""
    if not getattr(config, "base_model_tp_plan", None):
        raise Unsupported(
            f"--tensor-parallel needs a plan of how to divide the layers, and transformers has none for {name} "
            f"({config.model_type}): use --device-map auto."
        )
    heads = {config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads}
    if any(number % count() for number in heads):
        raise InvalidInput(
            f"--tensor-parallel must divide the attention heads and the key heads, but {name} has "
            f"{' and '.join(map(str, sorted(heads, reverse=True)))}, and got {count()}."
        )


def options() -> dict[str, Any]:
    """What `from_pretrained` divides a model by."""
    from transformers.distributed.configuration_utils import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=count(), tp_plan="auto")}


def make_ends_whole(model: Any) -> None:
    """Give every rank the whole embedding and the whole lm_head of a divided model.

    Raises Unsupported where nothing of it was divided, so that every rank would do all the work.
    """
    if not any(hasattr(weight, "to_local") for weight in model.get_decoder().layers.parameters()):
        raise Unsupported(
            f"--tensor-parallel divides the layers, but transformers divided none of {type(model).__name__}."
        )
    ends: list[nn.Module] = [model.get_input_embeddings(), model.get_output_embeddings()]
    whole: dict[int, nn.Parameter] = {}
    for module in ends:
        weight: Any = module.weight
        if id(weight) not in whole:
            tensor: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            whole[id(weight)] = nn.Parameter(tensor.detach(), requires_grad=False)
        module.weight = whole[id(weight)]
        module.__dict__.pop("forward", None)  # the plan's own, which would divide what comes in and out


def here(tensor: Any) -> Tensor:
    """A tensor's part on this rank."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
