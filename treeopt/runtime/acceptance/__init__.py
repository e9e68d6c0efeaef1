"""Acceptance rules: which guesses the target takes."""
