"""Milliseconds per step: from samples to an estimate for every size and depth."""
