"""Trees: the words for them, their kinds and shapes, and those that others published."""
