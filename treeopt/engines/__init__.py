"""Serving engines: the drafts that each takes, how a plan is written for it, and how its counts are read.

Engines check little, and several silently decode with another tree than the one they were given. So every limit of a
method is checked before anything is written. The tests read what was written by ports of the engines' own rules.

Each engine, or each family, has a file; registry.py finds the files, base.py has their words. plans.py makes a plan an `Export`
and writes it. templates.py and copied.py write what several engines take alike. imports.py and measured/ read counts,
reading.py reads trees.
"""
