"""Write a chosen tree, chain or schedule as an engine's own configuration, after checking what it accepts.

Engines check little, and several decode with another tree than the one they were given, silently. So every
limit of the table is checked first, and what was written is read again by a port of the engine's own rules:
nothing leaves here that would come back as something else.

write.py    the checks, and files for a tree, a chain or a plan
table.py    every engine: carrier, syntax, drafters, shape and limits · listing.py  the same, to be read
engine.py   what the table is made of · buffers.py, lists.py, chains.py  what several engines share
            and a module for each engine that reads a file; numbers.py for those that take numbers only
reading.py  trees from files of all of them · diagnosis.py  what each makes of a list that is not as it should be
"""
