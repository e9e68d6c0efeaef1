"""Runs the arguments as a Python program, once for each prompt of standard input, and prints what OpenVINO GenAI emitted.

A line a prompt: the version, and the number of tokens of every step of decoding, beside the text and that of the same
model alone. Everything is in float32, in which texts can be compared; the cache has 8 bits without that.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from typing import Any

import openvino_genai

FLOAT32 = {"KV_CACHE_PRECISION": "f32", "INFERENCE_PRECISION_HINT": "f32"}
DRAFT_MODEL, PIPELINE = openvino_genai.draft_model, openvino_genai.LLMPipeline
seen: dict[str, Any] = {}


class Watched(PIPELINE):
    def __init__(self, folder: str, device: str, **options: Any) -> None:
        super().__init__(folder, device, **options, **FLOAT32)
        self.alone = PIPELINE(folder, device, **FLOAT32)

    def generate(self, prompt: str, config: openvino_genai.GenerationConfig) -> str:
        found = super().generate([prompt], config)
        plain = self.alone.generate(prompt, max_new_tokens=config.max_new_tokens, do_sample=False)
        seen.update(steps=list(found.perf_metrics.raw_metrics.m_batch_sizes), plain=plain)
        return found.texts[0]


openvino_genai.LLMPipeline = Watched
openvino_genai.draft_model = lambda folder, device: DRAFT_MODEL(folder, device, **FLOAT32)
program, *arguments = sys.argv[1:]
for prompt in json.load(sys.stdin):
    sys.argv = [program, *(prompt if word == "PROMPT" else word for word in arguments)]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(program, run_name="__main__")
    print(json.dumps({"version": openvino_genai.__version__, **seen, "text": printed.getvalue()}))
