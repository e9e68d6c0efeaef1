"""The steps of the line, each reading the run directory and writing one file to it; named as their commands.

logs.py      requests -> requests.npz, of a log
session.py   what loads a model: options given, on top of those of the run
profile/     -> profile.json: timed.py, here; untimed.py, read or computed; placement.py, which drafts are timed
proof.py     bench: which of the next two is asked for
bench.py     -> bench.json; entrants.py, who is decoded; contest.py, how; plain.py, beside what; logged.py, requests of a log
launched.py  bench by servers that a command of the user's starts; lengths.py, their arms with each length -> arms.json
trees.py     score: a given tree beside the best · read_tree: the tree in a file
train.py     -> heads, and how they were made
"""
