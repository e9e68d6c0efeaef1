"""Measurements on a model: ranks, probes, whole answers and their quality."""
