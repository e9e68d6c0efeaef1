"""Drafters that copy text: what each engine's rule drafts after every step, from token ids alone, without a model.

rules.py         what all of them have in common; engines.py, by what name and options each is asked for
matches.py       where the last tokens of a text stood before
prompt_lookup.py one match is copied: vLLM, transformers, OpenVINO, ExLlamaV3; adaptive.py, how much of it ExLlamaV3 copies
llama_cpp.py     llama.cpp's five, and several of them at once
suffix.py        suffix decoding; tries.py, its compiled trie
replay.py        steps of recorded requests with a drafter: rows verified and tokens accepted
"""
