"""A tree as lines in the terminal."""

from collections.abc import Mapping

from rich.console import RenderableType
from rich.text import Text
from rich.tree import Tree as View

from treeopt.trees.tree import Choice, Tree


def tree_view(tree: Tree, gains: Mapping[Choice, float]) -> RenderableType:
    """The tree as indented lines; a node shows its rank, and the tokens per step that it adds where that is known."""
    heading = f"root: rows {len(tree)}, choices {len(tree) - 1}, depth {tree.depth}"
    views = [View(heading, guide_style="dim")]
    for path, parent in zip(tree.paths[1:], tree.parents[1:], strict=True):
        adds = f"  {gains[path]:+.4f}" if path in gains else ""
        views.append(views[parent].add(Text.assemble((str(path[-1]), "bold"), " ", (str(list(path)), "dim"), adds)))
    return views[0]
