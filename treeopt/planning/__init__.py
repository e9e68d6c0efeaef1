"""The choice: tokens per step over milliseconds per step.

table.py       drafts with both factors and their draws
candidates.py  which drafts there are: trees of every size and depth, or settings of a drafter that copies text
select.py      the choice among them, and what the data cannot tell apart
entries.py     what a plan says of the chosen draft
planner.py     all of it: from accuracies and latencies to a plan, with the schedule of which batch sizes get which draft
"""
