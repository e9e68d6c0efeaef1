"""python -m treeopt"""

from treeopt.cli import main

main()
