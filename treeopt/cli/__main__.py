"""``python -m treeopt.cli``."""

from treeopt.cli import main

main()
