"""Measurements on a model: ranks, probes, threads, whole answers and their quality."""
