"""Milliseconds per step: from samples to an estimate for every size and depth.

rounds.py       which step has its turn, and when there are enough rounds
measurements.py latency of a step from its samples and those of plain steps in the same rounds
surface.py      the cost of a step by rows and depth: a smooth surface through noisy timings
costs.py        StepCosts: all latencies of plans come from here
roofline.py     the time of a step by operations and bytes alone; hardware.py, devices and models by name
"""
