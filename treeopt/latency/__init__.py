"""Milliseconds per step: from samples to an estimate for every size and depth.

measurements.py  latency of a step from its samples and those of plain steps in the same rounds
rounds.py        when there are enough rounds; drift, margins of error
estimate.py      StepCosts: the one place where a latency is asked for, between measured sizes too
interpolation.py weights between measurements, and the shape of latency over rows that all of them share
roofline.py      what a step takes by operations and bytes alone; hardware.py, the devices and models that it knows
"""
