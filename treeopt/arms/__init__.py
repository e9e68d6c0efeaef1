"""Arms: settings that were run, what they gave, and what those would give that were not."""
