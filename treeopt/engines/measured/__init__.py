"""Readers of measurements that are of no engine, and what those of engines share.

Drafts that engines counted become survival.py's, by exposition.py (Prometheus), requests.py (histograms of requests) and
printed.py (rounded rates); the others are files of no engine.
"""
