"""A model's shape with random weights: what a step costs depends on shapes, not on what the weights say.

Nothing is read but a config.json. The heads' guesses mean nothing, so how many of them a step accepts is
drawn from a calibration's accuracies instead; decoding runs as ever.

accept : (K, R)  P(head k has the true token at rank r)
"""

from itertools import product
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.errors import InvalidInput, Unsupported
from treeopt.growth.grow import product_values
from treeopt.records.origins import DrafterRecord
from treeopt.runtime.acceptance.rules import Greedy, Nodes
from treeopt.runtime.drafters.medusa import MedusaHeads, check_bias
from treeopt.runtime.folder import check_config, loadable, parts_of, read_object
from treeopt.runtime.prompts.encoder import Encoder
from treeopt.runtime.prompts.sets import Conversation, PromptSet
from treeopt.runtime.session import Session
from treeopt.runtime.target import Target, check_device, wanted_dtype
from treeopt.trees.tree import Tree

RANDOM = "random weights"
NUM_HEADS = 4
# How configs say that a layer has experts: which of them a token takes, and so what is read, is up to weights.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")
NUM_PROMPTS, PROMPT_TOKENS = 64, 256  # repeated and cut to the wanted context
SPREAD = 0.02  # standard deviation of the heads' weights


def open_random_session(
    config: str, *, num_heads: int = NUM_HEADS, dtype: str | None = None, device: str | None = None, seed: int = 0
) -> Session:
    """A dense model of a ``config.json`` (the file or its folder) with Medusa-1 heads, all weights random.

    Raises InvalidInput for a config that transformers does not know, Unsupported for one with experts.
    """
    target = random_target(config, dtype=dtype, device=device, seed=seed)
    check_bias(target)
    sizes, shared = (num_heads, 1, target.width, target.vocab_size), target.lm_head.weight
    heads = MedusaHeads(*sizes, shared=shared, dtype=target.dtype, device=target.device)
    with torch.no_grad():
        heads.blocks.normal_(0.0, SPREAD, generator=torch.Generator(target.device).manual_seed(seed))
    tokens = np.random.default_rng(seed).integers(0, target.vocab_size, (NUM_PROMPTS, PROMPT_TOKENS))
    conversations = tuple(Conversation(tuple(row), ()) for row in tokens.tolist())
    encoder = Encoder(None, (), target.vocab_size)
    prompts = PromptSet(conversations, "random token ids", f"seed {seed}", encoder)
    record: DrafterRecord = {"kind": heads.kind, "id": RANDOM, "num_heads": num_heads, "num_layers": heads.num_layers}
    return Session(target, heads.eval().requires_grad_(False), record, prompts, weights=RANDOM)


def random_target(config: str, *, dtype: str | None, device: str | None, seed: int) -> Target:
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    transformers.logging.set_verbosity_error()
    path = Path(config)
    file = path / "config.json" if path.is_dir() else path
    description = read_object(file)
    if "model_type" not in description:
        raise InvalidInput(f"`random_weights` must be a config.json with a model_type, but {file} has none.")
    for part, key in product(parts_of(description), EXPERTS):
        if isinstance(number := part.get(key), int) and number > 1:
            raise Unsupported(
                f"`random_weights` is for dense models, but {file} has {key} = {number}: which experts a token takes depends "
                "on real weights, so load those with `model`."
            )
    check_config(description, file)
    device = check_device(device)
    with loadable("`random_weights` must be the config of a causal LM", str(file)):
        known = AutoConfig.from_pretrained(str(file))
        wanted = wanted_dtype(dtype, device) or getattr(known, "dtype", None) or torch.float32
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(known, dtype=wanted)
        model.eval().requires_grad_(False)
        name = file.resolve().parent.name if file.name == "config.json" else file.stem
        return Target(model, name=f"{RANDOM} of {name}")


class DrawnAcceptance(Greedy):
    """Accepts guesses by chance, as if heads erred independently of each other; the text is the target's own.

    A node is the last accepted one with the product of the accuracies along its path, less those of its
    children; so P(d guesses or more are accepted) is the sum of the products of the nodes at depth d.

    >>> draw = DrawnAcceptance(np.array([[0.6, 0.2]]), np.random.default_rng(0)).accept
    >>> last = draw(Tree.dense([2]), [[0, 0, 0]] * 10_000, [[0, 0, 0]] * 10_000)
    >>> round(sum(node > 0 for node in last) / 10_000, 2)
    0.8
    """

    def __init__(self, accept: NDArray[np.float64], rng: np.random.Generator) -> None:
        self._rates, self._rng = accept, rng
        self._known: dict[Tree, NDArray[np.float64]] = {}

    def accept(self, tree: Tree, tokens: Nodes, choices: Nodes, logits: Tensor | None = None) -> list[int]:
        if tree not in self._known:
            self._known[tree] = np.cumsum(last_node_shares(tree, self._rates))
        last = np.searchsorted(self._known[tree], self._rng.random(len(tokens)), side="right")
        return np.minimum(last, len(tree) - 1).tolist()


def last_node_shares(tree: Tree, accept: NDArray[np.float64]) -> NDArray[np.float64]:
    """(T,) P(node is the last accepted one); a rank or head that ``accept`` does not know is never right.

    >>> last_node_shares(Tree.chain(2), np.array([[0.6], [0.5]])).round(3).tolist()
    [0.4, 0.3, 0.3]
    """
    table = np.zeros((max(tree.depth, len(accept)), max([accept.shape[1], *(tree.ranks + 1)])))
    table[: len(accept), : accept.shape[1]] = accept
    shares = product_values(table, tree.paths)
    np.subtract.at(shares, tree.parents[1:], shares[1:].copy())
    return shares
