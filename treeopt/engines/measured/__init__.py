"""Readers of measurements that are of no engine, and what those of engines share.

medusa_pt.py    hit tensors of Medusa's heads_accuracy.py -> a whole trace
ranks.py        ranks that an engine logged, JSON lines -> a whole trace
rates.py        recall@k per head, JSON; one acceptance vector for all depths, as Sequoia keeps it
table.py        accuracies or counts, CSV
formats.py      these kinds of files
survival.py     what serving engines counted of their drafts -> the survival of a chain; with exposition.py
                (Prometheus), requests.py (histograms of requests), printed.py (rounded rates), drafters.py
files.py        what a file holds, before anything is made of it
"""
