"""The module that a step trains, which turns a batch into a loss and into counts; the losses.

The base is frozen: its hidden states are computed without gradients. Losses are sums over states: a step divides them once,
however many passes it takes. Head k (from 1) guesses the token at p + k + 1 of a state at place p.

In Medusa-2 the base and its heads learn together, the base through LoRA: L = L_base + lambda_0 L_heads (Medusa, section
2.2.2). On the model's own answers L_base is the distance to the original base, KL(original || now) (section 2.3.2), and the
original is the same model with the adapter switched off; on given answers it is the loss of the text. The base waits
while the heads learn the first quarter of the run alone.

B texts · T tokens · n states · d width · V vocabulary · K heads
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treeopt.runtime.drafters.states import places_among
from treeopt.runtime.target import Target
from treeopt.runtime.training.batches import NO_LABEL, Batch, Text, make_batch
from treeopt.runtime.training.recipe import BASE_RATE, Recipe

# () loss, divided by the trials of the whole step, and (2K + 2,) counts: see `counts_of`
Counted = tuple[Tensor, Tensor]
Group = dict[str, Any]  # of parameters, as torch's optimisers take them, with their highest learning rate


def counts_of(
    head_loss: Tensor, hits: Tensor, base_loss: Tensor | float = 0.0, base_kl: Tensor | float = 0.0
) -> Tensor:
    """(2K + 2,) what a batch counts, summed over its states.

    head_loss : (K,) [nats]
    hits      : (K,) states at which a head's first choice is the label
    base_loss : -log p of the text under the base [nats]; 0 where the base is frozen
    base_kl   : KL(original base || base) [nats]
    """
    base = torch.stack([torch.as_tensor(part, device=hits.device).double() for part in (base_loss, base_kl)])
    return torch.cat([head_loss.double(), hits.double(), base]).detach()


class Trainee(nn.Module):
    """Heads on a base, which is frozen, or learns through an adapter; all else stays as it is.

    base        : the target with its adapter; None where it is frozen
    own_answers : whether the texts are the model's own, so that a base that learns is held where it was
    """

    def __init__(self, heads: Any, recipe: Recipe, target: Target, *, own_answers: bool = True) -> None:
        super().__init__()
        self.heads, self.recipe, self.target, self.own_answers = heads, recipe, target, own_answers
        self.base: Any = _adapted(target.model, recipe.seed) if recipe.defaults.trains_base else None

    def groups(self) -> list[Group]:
        peak, base = self.recipe.peak_rate, [] if self.base is None else trained(self.base)
        groups = [{"params": trained(self.heads), "peak": peak}, {"params": base, "peak": BASE_RATE * peak}]
        return [group for group in groups if group["params"]]

    def train(self, mode: bool = True) -> Trainee:
        """Dropout only where LoRA has it: the base's own would disturb what it is compared with."""
        super().train(mode)
        for name, module in self.base.named_modules() if self.base is not None else ():
            module.train(mode and "lora_dropout" in name)
        return self

    def forward(self, batch: Batch, trials: Tensor, share: float) -> Counted:
        """The loss of a batch; outside training all parts of it are counted.

        trials : (K+1,) labels of the whole step
        """
        alone, teacher = self.base is None or (self.training and self.recipe.heads_alone(share)), None
        with torch.set_grad_enabled(torch.is_grad_enabled() and not alone):
            hidden = self.target.states(input_ids=batch.tokens, use_cache=False)
        if self.recipe.defaults.teacher:
            with torch.no_grad():
                teacher = self.target.scored(batch.states(hidden))
        head_loss, hits = count(self.heads, hidden, batch, teacher)
        loss = self.recipe.joint_weight(share) * heads_loss(head_loss, trials, self.recipe)
        if alone:
            return loss, counts_of(head_loss, hits)
        labels, logits = batch.ahead[:, 0], self.target.scored(batch.states(hidden))
        base_loss, base_kl = text_loss(logits, labels), torch.zeros_like(loss)
        if self.own_answers or not self.training:
            base_kl = kl_to_base(logits, self.original(batch), labels)
        loss = loss + (base_kl if self.own_answers else base_loss) / trials[0]
        return loss, counts_of(head_loss, hits, base_loss, base_kl)

    @torch.no_grad()
    def original(self, batch: Batch) -> Tensor:
        """(n, V) logits of the base as it was."""
        with self.base.disable_adapter():
            return self.target.scored(batch.states(self.target.states(input_ids=batch.tokens, use_cache=False)))


def _adapted(model: Any, seed: int) -> Any:
    """A model with LoRA's layers (Medusa, appendix), which take their places inside its own decoder: that one runs."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    with warnings.catch_warnings():  # peft asks for an attribute that transformers is about to rename
        warnings.simplefilter("ignore", FutureWarning)
        lora = LoraConfig(r=32, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM")
        return get_peft_model(model, lora)


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def count(heads: Any, hidden: Tensor, batch: Batch, teacher: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(K,) loss and (K,) hits of the heads on (B, T, ...) states, each summed over the states where it has a label.

    A token that the heads do not guess is no label.

    teacher : (n, V) logits of the base at the batch's states; the loss is then against the base's distribution
    """
    ahead, ids = batch.ahead, heads.token_ids
    if ids is not None:
        places = places_among(ahead, ids)
        ahead = torch.where(ids[places] == ahead, places, NO_LABEL)
        teacher = None if teacher is None else teacher[:, ids]
    losses, hits = [], []
    for k, (read, logits_of) in enumerate(heads.taught(hidden.to(heads.dtype), batch), 1):
        labels, logits = ahead[:, k], logits_of(read)
        # The base guesses the label of head k at the state k places on, which is of the same text.
        wanted = None if teacher is None else teacher.roll(-k, 0)
        losses.append(text_loss(logits, labels) if wanted is None else teacher_loss(logits, wanted, labels))
        hits.append((logits.argmax(-1) == labels).sum())
    return torch.stack(losses), torch.stack(hits)


def text_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p of the (N,) labels under (N, V) logits [nats], summed; NO_LABEL counts nothing.

    >>> round(float(text_loss(torch.zeros(3, 4), torch.tensor([0, 2, NO_LABEL]))), 4)  # 2 ln 4
    2.7726
    """
    return F.cross_entropy(at_least_float32(logits), labels, ignore_index=NO_LABEL, reduction="sum")


def teacher_loss(logits: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of (N, V) logits against the teacher's distribution, summed over the rows with a label [nats]."""
    known = labels != NO_LABEL
    wanted = at_least_float32(teacher[known]).softmax(-1)
    return F.cross_entropy(at_least_float32(logits[known]), wanted, reduction="sum")


def kl_to_base(logits: Tensor, original: Tensor, labels: Tensor) -> Tensor:
    """KL(original || now) of two (N, V) logits, summed over the rows with a label [nats]."""
    now, before = (at_least_float32(part[labels != NO_LABEL]).log_softmax(-1) for part in (logits, original))
    return F.kl_div(now, before, reduction="sum", log_target=True)


def at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def heads_loss(head_loss: Tensor, trials: Tensor, recipe: Recipe) -> Tensor:
    """sum_k decay**k times the mean loss of head k from 1 (Medusa, equation 1), which is 0 without a trial."""
    weights = recipe.defaults.decay ** torch.arange(1, len(trials), dtype=torch.float64)
    return (weights.to(head_loss) * head_loss / trials[1:].clamp_min(1)).sum()


@torch.no_grad()
def usual_rms(target: Target, texts: Sequence[Text], most: int = 8) -> float:
    """Root mean square of the numbers in the target's states of the first texts."""
    batch = make_batch(texts[:most], 0, target.device)
    hidden = target.states(input_ids=batch.tokens, use_cache=False)
    return float(batch.states(hidden).double().square().mean().sqrt())
