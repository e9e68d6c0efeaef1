"""Runs the arguments as a Python program, once for each prompt of standard input, and prints what transformers emitted.

A line a prompt: the version, and the number of tokens of every step of decoding, beside the text.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

GENERATE = transformers.GenerationMixin.generate


class Steps(BaseStreamer):
    """Counts the tokens of every step; the prompt comes first."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.sizes.append(value.numel())

    def end(self) -> None: ...


steps = Steps()


def generate(self: transformers.GenerationMixin, *args: Any, **options: Any) -> torch.Tensor:
    """The same, watched; what it calls itself, such as the assistant's, is not."""
    transformers.GenerationMixin.generate = GENERATE
    try:
        return GENERATE(self, *args, streamer=steps, **options)
    finally:
        transformers.GenerationMixin.generate = generate


transformers.GenerationMixin.generate = generate
program, *arguments = sys.argv[1:]
for prompt in json.load(sys.stdin):
    steps.sizes.clear()
    sys.argv = [program, *(prompt if word == "PROMPT" else word for word in arguments)]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(program, run_name="__main__")
    print(json.dumps({"version": transformers.__version__, "steps": steps.sizes[1:], "text": printed.getvalue()}))
