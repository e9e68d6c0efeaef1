"""Memory: the batch is halved where it runs out."""

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from treeopt.errors import OutOfRange

T = TypeVar("T")


def with_less_memory(attempt: Callable[[int], T], batch_size: int, say: Callable[[str], None]) -> tuple[T, int]:
    """``attempt(batch_size)``, halved until it fits: its result and the batch size that fitted.

    Raises OutOfRange where a single row is too much.

    >>> def attempt(batch_size):
    ...     if batch_size > 2:
    ...         raise torch.OutOfMemoryError
    ...     return "done"
    >>> with_less_memory(attempt, 8, print)
    Out of memory with 8 rows at once: going on with 4.
    Out of memory with 4 rows at once: going on with 2.
    ('done', 2)
    """
    while True:
        try:
            return attempt(batch_size), batch_size
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        # The failed attempt's tensors are free only now that its traceback is gone.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if batch_size == 1:
            raise OutOfRange(
                "One row at a time must fit into memory, but it does not: use a smaller `dtype`, shorter "
                "prompts or answers, a smaller tree, or `device_map=auto`."
            )
        say(f"Out of memory with {batch_size} rows at once: going on with {batch_size // 2}.")
        batch_size //= 2


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out; on a CPU torch raises a plain RuntimeError."""
    words = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(w in str(error) for w in words)
