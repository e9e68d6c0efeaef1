"""Drafters that copy text: what each engine's rule drafts after every step, from token ids alone, without a model.

rules.py         what all of them have in common
engines.py       the drafters that engines have, with their options; settings.py, a search over these
matches.py       where the last tokens of a text stood before: n-grams, suffix automata, hashes
prompt_lookup.py one match is copied: vLLM, transformers, OpenVINO, ExLlamaV3
llama_cpp.py     llama.cpp's five
suffix.py        suffix decoding
replay.py        steps of recorded requests with a drafter: rows verified and tokens accepted
"""
