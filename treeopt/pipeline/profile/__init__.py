"""Profiles: timed here, by a command, or read from a table."""
