"""Prompts: from the files that people have to the tokens before an answer."""
