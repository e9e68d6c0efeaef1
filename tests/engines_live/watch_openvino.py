"""Runs the arguments as a Python program, once for each prompt of standard input, and prints what OpenVINO GenAI emitted.

A line a prompt: the version, and the number of tokens of every step of decoding, beside the text and that of the same
model alone. Everything is in float32, in which texts can be compared; a CPU with bfloat16 would decode in that.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from typing import Any

FLOAT32 = {"KV_CACHE_PRECISION": "f32", "INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}


def watch(seen: dict[str, Any]) -> None:
    """Have the library's pipeline say what it emits at a time, and what the model emits alone."""
    import openvino_genai as genai

    pipeline, draft_model = genai.LLMPipeline, genai.draft_model

    class Watched(pipeline):
        def __init__(self, folder: str, device: str, **options: Any) -> None:
            super().__init__(folder, device, **{**options, **FLOAT32})
            self.alone = pipeline(folder, device, **FLOAT32)

        def generate(self, prompt: str, config: genai.GenerationConfig) -> str:
            found = super().generate([prompt], config)
            plain = self.alone.generate(prompt, max_new_tokens=config.max_new_tokens, do_sample=False)
            steps = list(found.perf_metrics.raw_metrics.m_batch_sizes)
            seen.update(version=genai.__version__, steps=steps, plain=plain)
            return found.texts[0]

    genai.LLMPipeline = Watched
    genai.draft_model = lambda folder, device, **own: draft_model(folder, device, **FLOAT32)


def main(program: str, *arguments: str) -> None:
    seen: dict[str, Any] = {}
    watch(seen)
    for prompt in json.load(sys.stdin):
        sys.argv = [program, *(prompt if word == "PROMPT" else word for word in arguments)]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(program, run_name="__main__")
        print(json.dumps({**seen, "text": printed.getvalue()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
