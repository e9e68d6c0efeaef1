"""Tokens per step: growing trees, and what they reach on answers not seen."""
