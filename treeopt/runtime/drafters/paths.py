"""DSpark and DFlash2: DFlash's block, still one pass, whose guesses also depend on the token before theirs.

h is the normed row of the block that makes a guess, u = lm_head h its logits as DFlash's, and a the token before it on its path.
DSpark adds W2 W1[a] to u (deepspec/modeling/dspark, its head "vanilla", which published drafters have).
DFlash2 keeps the likeliest tokens by u, and adds <A[a] * H h, B[b]> to the logit of each such b. Its layers have
convolutions over the rows of a block before and behind attention and MLP (NeMo Automodel, draft_qwen3_dflash2.py).

b rows · n states · E nodes of a level · B rows of a block · K guesses · d width of the layers · r rank of what is added
V vocabulary · Vt tokens that are guessed · t taps of a convolution
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treeopt.runtime.drafters.dflash import BlockState, DFlashHeads, Form
from treeopt.runtime.drafters.layer import zero_linear
from treeopt.runtime.drafters.protocol import Frontier, top_candidates
from treeopt.runtime.drafters.states import Logits
from treeopt.runtime.training.batches import Batch


class PathHeads(DFlashHeads):
    """The base of both. A subclass says what `joined` computes, and `logits` of it.

    rank : r
    """

    has_marginals = False
    rank: int

    def start(self, batch_size: int, capacity: int) -> BlockState:
        return PathDraft(self, batch_size, capacity)

    def joined(self, rows: Tensor, before: Tensor) -> Tensor:
        """(..., d + r) what guesses are read from, by (..., d) normed rows and the (...,) tokens before the guesses."""
        raise NotImplementedError

    def taught(self, hidden: Tensor, batch: Batch) -> Iterator[tuple[Tensor, Logits]]:
        rows, before = self.norm(self.rows(hidden, batch)), batch.ahead.clamp_min(0)
        for k in range(self.num_heads):
            yield self.joined(rows[:, k], before[:, k]), self.logits


class PathDraft(BlockState):
    """The draft of guesses each of which depends on its parent in the tree."""

    def begin(self, roots: Tensor, depth: int) -> None:
        self.made = self.drafter.norm(self.rows(roots))  # (b, K, d)

    def logits(self, level: Frontier, tokens: Tensor) -> Tensor:
        rows = self.made[:, level.depth, None].expand(-1, level.nodes, -1)
        return torch.as_tensor(self.drafter.logits(self.drafter.joined(rows, tokens)))


class DSparkHeads(PathHeads):
    """A DSpark drafter.

    rank    : r
    options : see `DFlashHeads`
    """

    kind = "dspark"

    def __init__(self, config: Any, form: Form, *, rank: int, **options: Any) -> None:
        super().__init__(config, form, **options)
        self.rank = rank
        # (V, r) whose rows are looked up, and (Vt, r)
        rows = {"markov_w1": form.vocab_size, "markov_w2": self.draft_vocab_size}
        self.markov_head = nn.ModuleDict(
            {name: zero_linear(rank, count, bias=False, **self.placed) for name, count in rows.items()}
        )

    def joined(self, rows: Tensor, before: Tensor) -> Tensor:
        head: Any = self.markov_head
        return torch.cat([rows, F.embedding(before, head["markov_w1"].weight)], -1)

    def logits(self, states: Tensor) -> Tensor:
        rows, known = states[..., : -self.rank], states[..., -self.rank :]
        return F.linear(rows, self.lm_head) + self.markov_head["markov_w2"](known)


class DFlash2Heads(PathHeads):
    """A DFlash2 drafter.

    rank    : r
    kept    : how many tokens of a depth it chooses among; it guesses no others
    taps    : t
    group   : neighbouring channels whose kernels change alike
    options : see `DFlashHeads`
    """

    kind = "dflash2"

    def __init__(
        self, config: Any, form: Form, *, rank: int, kept: int, taps: int = 2, group: int = 16, **options: Any
    ) -> None:
        super().__init__(config, form, **options)
        d, placed = config.hidden_size, self.placed
        self.rank, self.kept = rank, kept
        self.candidate_selector = Selector(d, rank, form.vocab_size, **placed)
        for layer in self.layers:
            for name in ("attention_conv", "mlp_conv"):
                setattr(layer, name, Convolutions(d, taps, group, **placed))

    @property
    def draft_vocab_size(self) -> int:
        return self.kept

    def between(self, layer: Any, name: str, read: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        return getattr(layer, name)(read, part)

    def joined(self, rows: Tensor, before: Tensor) -> Tensor:
        selector = self.candidate_selector
        gate = F.embedding(before, selector.predecessor_codebook) * selector.hidden_projection(rows)
        return torch.cat([rows, gate], -1)

    def logits(self, states: Tensor) -> Tensor:
        rows, gate = states[..., : -self.rank], states[..., -self.rank :]
        own = F.linear(rows, self.lm_head)
        kept = top_candidates(own, self.kept)  # (..., kept)
        follows = F.embedding(kept, self.candidate_selector.successor_codebook)
        scores = own.gather(-1, kept) + (follows @ gate[..., None])[..., 0]
        return torch.full_like(own, -torch.inf).scatter(-1, kept, scores)


class Selector(nn.Module):
    """A, B and H of DFlash2; all are zero at first."""

    def __init__(self, width: int, rank: int, vocab_size: int, **placed: Any) -> None:
        super().__init__()
        self.predecessor_codebook, self.successor_codebook = (
            nn.Parameter(torch.zeros((vocab_size, rank), **placed)) for _ in range(2)
        )
        self.hidden_projection = zero_linear(width, rank, bias=False, **placed)


class Convolutions(nn.Module):
    """DFlash2's convolutions before and behind attention or MLP: a row is mixed with the t - 1 before it in its block, channel by channel.

    A kernel is its base and a change that comes of what the first of the two reads, alike within a group of channels.
    """

    def __init__(self, width: int, taps: int, group: int, **placed: Any) -> None:
        super().__init__()
        self.shape, self.group = (2, taps, width // group), group
        self.base_kernel = nn.Parameter(torch.zeros((2, taps, width), **placed))
        self.kernel_projection = zero_linear(width, 2 * taps * (width // group), bias=False, **placed)

    def forward(self, read: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        changes = self.kernel_projection(read).unflatten(-1, self.shape).repeat_interleave(self.group, -1)
        before, behind = (self.base_kernel + changes).unbind(-3)  # (b, B, t, d) of each
        return mixed(part(mixed(read, before)), behind)


def mixed(rows: Tensor, kernels: Tensor) -> Tensor:
    """(b, B, d) sums of each row and those before it, times its (b, B, t, d) kernels; there are zeros before the first."""
    back = [F.pad(rows, (0, 0, i, 0))[:, : rows.shape[1]] for i in range(kernels.shape[2])]
    return (torch.stack(back, 2) * kernels).sum(2)
