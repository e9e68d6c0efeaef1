"""What is measured on a model: ranks, steps, whole answers."""
