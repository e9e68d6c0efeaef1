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


class Steps(BaseStreamer):
    """Counts the tokens of every step; the prompt comes first."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.sizes.append(value.numel())

    def end(self) -> None: ...


def watch(steps: Steps) -> None:
    """Have ``generate`` tell its steps; what it calls itself, such as the assistant's, is not watched."""
    own = transformers.GenerationMixin.generate

    def generate(self: transformers.GenerationMixin, *args: Any, **options: Any) -> torch.Tensor:
        transformers.GenerationMixin.generate = own
        try:
            return own(self, *args, streamer=steps, **options)
        finally:
            transformers.GenerationMixin.generate = generate

    transformers.GenerationMixin.generate = generate


def main(program: str, *arguments: str) -> None:
    steps = Steps()
    watch(steps)
    for prompt in json.load(sys.stdin):
        steps.sizes.clear()
        sys.argv = [program, *(prompt if word == "PROMPT" else word for word in arguments)]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(program, run_name="__main__")
        found = {"version": transformers.__version__, "steps": steps.sizes[1:], "text": printed.getvalue()}
        print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
