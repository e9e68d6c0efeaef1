"""Readers of measurements: of files that are of no engine, and what the readers of engines' counts share.

Counts of drafts become `survival.Drafts`: from counters by exposition.py (Prometheus), from histograms of requests by requests.py,
from rounded rates by rates.py. tables.py reads tables of accuracies.
"""
