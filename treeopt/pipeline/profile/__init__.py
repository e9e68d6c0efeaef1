"""Latencies of decoding steps -> profile.json: timed here, by a command, read, or computed.

timed.py      real steps of a model that is loaded here, by treeopt or an engine, in two stages
command.py    a user's own benchmark, run for every tree
untimed.py    latencies that others timed, from a file, or that nobody timed, of a device's roofline
placement.py  which sizes and trees are timed
outcome.py    the end of a measurement: what is said of it, and what the run had measured before with it as one
"""
