"""Measurements that other tools wrote, as calibrations and traces.

medusa_pt.py    hit tensors of Medusa's heads_accuracy.py -> a whole trace
recall.py       recall@k per head, JSON
sequoia.py      one acceptance vector for all depths, as Sequoia keeps it
table.py        accuracies or counts, CSV
ranks.py        ranks that an engine logged, JSON lines -> a whole trace
vllm_metrics.py vllm_requests.py sglang.py tensorrt_llm.py llama_cpp.py
                what serving engines counted of their drafts -> the survival of a chain, with survival.py,
                exposition.py (Prometheus), requests.py (histograms of requests), printed.py (rounded rates)
files.py        what a file holds, before anything is made of it · rates.py   counts from shares
kinds.py        which of them reads a file

A kind is recognised by what the file holds. Where ranks are known state by state a `RankTrace` comes
out, so that trees can be replayed; else a `Calibration` of marginal counts, or of those that a chain needs.
"""

from treeopt.importing.kinds import KINDS, read_measurement

__all__ = ["KINDS", "read_measurement"]
