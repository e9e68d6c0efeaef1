"""Serving engines: what each takes, how a chosen tree, chain or schedule is written for it, and what it counts.

Engines check little, and several decode with another tree than the one they were given, silently. So every
limit of a method is checked before its engine's file writes; the tests read what was written by ports of the
engines' own rules.

A file is of one engine, or of one family; registry.py finds them, base.py has their words. A plan becomes requests in
plans.py, and a request files, once it is checked. imports.py and measured/ read what was counted, reading.py
lists from anywhere. What engines of a kind share is in chains.py, lists.py and tensorrt_trees.py.
"""
