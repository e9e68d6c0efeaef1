"""What a tree is: its words, its shapes, and the trees that others published."""
