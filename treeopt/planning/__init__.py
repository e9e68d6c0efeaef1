"""The choice: tokens per step over milliseconds per step.

candidates.py  every size and depth, with both factors and their bootstrap draws
select.py      the choice among them, and what the data cannot tell apart
entries.py     what a plan says of the chosen tree
planner.py     all of it: from accuracies and latencies to a plan, with the schedule of which batch sizes get which tree
"""
