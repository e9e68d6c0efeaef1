"""Servers that are up: what they serve, what they count while they do, and how long they take."""
