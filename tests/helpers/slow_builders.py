"""How engines build dynamic trees, ported from their sources step by step: slow, one sequence at a time, flat indices kept.

What a drafter says of a path of tokens is a list, one number for each token: its probability, or the logarithm of it. Where
an engine leaves equal scores to its library (``torch.topk``), the first of them is taken.

Path: tokens from the root's first child on
"""

from collections.abc import Callable, Sequence

Path = tuple[int, ...]
Says = Callable[[Path], Sequence[float]]


def topk(scores: Sequence[float], count: int) -> list[int]:
    """Places of the largest, the largest first, of equal ones the first."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])[:count]


def sglang_tree(probability: Says, steps: int, width: int, draft_tokens: int) -> list[Path]:
    """SGLang: ``select_top_k_tokens``, ``organize_draft_results``, and the links of the build kernel; without the root."""
    ids = topk(probability(()), width)
    scores = [probability(())[i] for i in ids]
    frontier = [(i,) for i in ids]
    score_list, token_list, parent_list = list(scores), list(ids), list(range(-1, width))
    for step in range(1, steps):
        found = [topk(probability(path), width) for path in frontier]
        expanded = [
            score * probability(path)[i] for score, path, ids in zip(scores, frontier, found, strict=True) for i in ids
        ]
        tokens = [i for ids in found for i in ids]
        kept = topk(expanded, width)
        score_list, token_list = score_list + expanded, token_list + tokens
        parent_list += [place + width**2 * (step - 1) + width for place in kept]
        scores, frontier = [expanded[i] for i in kept], [(*frontier[i // width], tokens[i]) for i in kept]
    selected = sorted(topk(score_list, draft_tokens - 1))
    paths: dict[int, Path] = {}
    for place in selected:
        parent = place // width  # 0 is the root
        above = () if parent == 0 else paths.get(parent_list[parent])
        assert above is not None, "invalid eagle tree"
        paths[place] = (*above, token_list[place])
    return list(paths.values())


def eagle_tree(log_probability: Says, total_token: int, depth: int, top_k: int) -> list[Path]:
    """EAGLE's repository, ``topK_genrate``: ``depth`` rounds after the first level, ``total_token`` with the root."""
    total_tokens = total_token - 1
    index = topk(log_probability(()), top_k)
    scores = [log_probability(())[i] for i in index]
    scores_list, ss_token, parents_list = list(scores), list(index), [0]
    topk_cs_index = list(range(top_k))
    inputs: list[Path] = [(i,) for i in index]
    for i in range(depth):
        bias = 1 + top_k**2 * max(0, i - 1) + (top_k if i > 0 else 0)
        parents_list += [place + bias for place in topk_cs_index]
        rows = [topk(log_probability(path), top_k) for path in inputs]
        cu_scores = [
            log_probability(path)[token] + score
            for score, path, row in zip(scores, inputs, rows, strict=True)
            for token in row
        ]
        tokens = [token for row in rows for token in row]
        topk_cs_index = topk(cu_scores, top_k)
        scores = [cu_scores[j] for j in topk_cs_index]
        inputs = [(*inputs[j // top_k], tokens[j]) for j in topk_cs_index]
        scores_list, ss_token = scores_list + cu_scores, ss_token + tokens
    best = sorted(topk(scores_list, total_tokens))
    draft_parents = [parents_list[place // top_k] for place in best]
    mask_index = [1 + best.index(parent - 1) if parent else 0 for parent in draft_parents]
    paths: list[Path] = [()]
    for place, above in zip(best, mask_index, strict=True):
        paths.append((*paths[above], ss_token[place]))
    return paths[1:]


class Node:
    """A candidate of OpenVINO's graph; ``number`` stands for its address, as later ones come behind earlier ones."""

    def __init__(self, number: int, path: Path, score: float) -> None:
        self.number, self.path, self.score, self.layer = number, path, score, len(path)

    def order(self) -> tuple[float, int, int]:
        return -self.score, self.layer, self.number


def openvino_tree(
    log_probability: Says, tree_depth: int, branching_factor: int, num_assistant_tokens: int
) -> list[Path]:
    """OpenVINO GenAI: every node of a layer's frontier adds its best children, the best of the layer go on."""
    pool: list[Node] = []
    frontier = [Node(-1, (), 0.0)]
    for _ in range(tree_depth):
        layer = []
        for node in frontier:
            of_tokens = log_probability(node.path)
            for token in topk(of_tokens, branching_factor):
                layer.append(Node(len(pool) + len(layer), (*node.path, token), node.score + of_tokens[token]))
        pool += layer
        frontier = sorted(layer, key=Node.order)[:branching_factor]
    return [node.path for node in sorted(pool, key=Node.order)[:num_assistant_tokens]]
