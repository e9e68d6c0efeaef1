"""Drafters that copy text: what each engine's rule drafts after every step, from token ids alone, without a model.

rules.py         what all of them have in common; engines.py, by what name and options each is asked for
matches.py       where the last tokens of a text stood before
prompt_lookup.py one match is copied: vLLM, transformers, OpenVINO, ONNX Runtime GenAI, ExLlamaV3, TensorRT-LLM's SA
adaptive.py      how much of it ONNX Runtime GenAI and ExLlamaV3 copy; text_pool.py, TensorRT-LLM's SA with its global pool
match_pool.py    TensorRT-LLM's NGram; llama_cpp.py, llama.cpp's five, and several of them at once
pairs.py         copied text, or a neural drafter's guesses where none is found
suffix.py        suffix decoding; sglang.py, SGLang's trie; tries.py, the compiled trie of both
replay.py        steps of recorded requests with a drafter: rows verified and tokens accepted
"""
