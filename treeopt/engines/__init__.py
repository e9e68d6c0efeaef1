"""Serving engines: what each takes, how a chosen tree, chain or schedule is written for it, and what it counts.

Engines check little, and several decode with another tree than the one they were given, silently. So every
limit of a method is checked before its engine's file writes; the tests read what was written by ports of the
engines' own rules.

NAME.py      all of one engine: its methods and limits, what it is told, its files that are imported
registry.py  every engine, read from this folder · base.py  the words that engines are made of
write.py     the checks, and files for a request · plans.py  a plan as a request
chains.py    chains, schedules and flags as data · programs.py  Python programs · lists.py  lists of choices
tensorrt_trees.py  trees of TensorRT-LLM's old engines, which Triton serves as well
imports.py   measurements from files · measured/  what they share, and formats of no engine
reading.py   trees from files of all engines, and what each makes of a list that is not as it should be
"""
