"""Files of no engine that are imported: what they must hold, how they are recognised and read."""

from treeopt.engines.base import Kind
from treeopt.engines.measured import medusa_pt, ranks, rates, table

FORMATS = {
    "medusa-pt": Kind("one table of hits a head, as Medusa's heads_accuracy.py saves it", medusa_pt.matches, medusa_pt.read),
    "recall": Kind('{"recall": ...} or heads with "recall@1"', rates.is_recall, rates.read_recall, ("trials",)),
    "acceptance": Kind("one vector of chances, or an object with 'acceptance'", rates.is_vector, rates.read_vector,
                       ("trials", "heads")),
    "csv": Kind("CSV with a column 'head' in its first line", table.matches, table.read, ("trials",)),
    "ranks": Kind('{"ranks": [[...], ...]} in every line', ranks.matches, ranks.read),
}  # fmt: skip
