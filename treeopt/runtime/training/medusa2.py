"""Medusa-2: the base and its heads learn together, the base through LoRA.

L = L_base + lambda_0 L_heads (Medusa, section 2.2.2). On the model's own answers L_base is the distance to
the original base, KL(original || now) (section 2.3.2), and the original is the same model with the adapter
switched off; on given answers it is the loss of the text. The base waits while the heads learn the first
quarter of the run alone.

n states · d width · V vocabulary
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from treeopt.runtime.target import Target
from treeopt.runtime.training.batches import Batch
from treeopt.runtime.training.losses import kl_to_base, text_loss
from treeopt.runtime.training.recipe import BASE_RATE, Recipe
from treeopt.runtime.training.trainees import Sums, count_heads, dtype_of, heads_loss

# Medusa, appendix
LORA: dict[str, Any] = {"r": 32, "lora_alpha": 16, "lora_dropout": 0.05, "target_modules": "all-linear"}


class JointTrainee(nn.Module):
    """Heads and a base with an adapter; all but these stays as it is.

    own_answers : whether the texts are the model's own, so that the base is held where it was
    """

    needs_states = False

    def __init__(self, heads: Any, recipe: Recipe, target: Target, *, own_answers: bool) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(recipe.seed)
        with warnings.catch_warnings():  # peft asks for an attribute that transformers is about to rename
            warnings.simplefilter("ignore", FutureWarning)
            # LoRA's layers take their places inside the target's own decoder, which is the one that runs.
            self.base: Any = get_peft_model(target.model, LoraConfig(**LORA, task_type="CAUSAL_LM"))
        self.heads, self.recipe, self.own_answers = heads, recipe, own_answers
        self._decoder: Callable[..., Any] = lambda tokens: target.decoder(input_ids=tokens, use_cache=False)
        self._scores: Callable[[Tensor], Tensor] = lambda hidden: target.scores(target.logits(hidden))

    def groups(self) -> list[dict[str, Any]]:
        heads = [p for p in self.heads.parameters() if p.requires_grad]
        adapter = [p for p in self.base.parameters() if p.requires_grad]
        return [
            {"params": heads, "peak": self.recipe.peak_rate},
            {"params": adapter, "peak": BASE_RATE * self.recipe.peak_rate},
        ]

    def train(self, mode: bool = True) -> JointTrainee:
        """Dropout only where LoRA has it: the base's own would disturb what it is compared with."""
        super().train(mode)
        self.base.eval()
        for name, module in self.base.named_modules():
            if "lora_dropout" in name:
                module.train(mode)
        return self

    def forward(self, batch: Batch, hidden: None, trials: Tensor, share: float) -> Sums:
        """The loss of a batch; outside training all parts of it are counted."""
        alone = self.training and self.recipe.heads_alone(share)
        with torch.no_grad() if alone else nullcontext():
            states = batch.states(self._decoder(batch.tokens).last_hidden_state)
        head_loss, hits = count_heads(self.heads, states.to(dtype_of(self.heads)), batch)
        loss = self.recipe.joint_weight(share) * heads_loss(head_loss, trials, self.recipe)
        base_loss = base_kl = torch.zeros_like(loss)
        if not alone:
            labels, logits = batch.ahead[:, 0], self._scores(states)
            base_loss = text_loss(logits, labels)
            if self.own_answers or not self.training:
                base_kl = kl_to_base(logits, self._original(batch), labels)
            loss = loss + (base_kl if self.own_answers else base_loss) / trials[0]
        return Sums(loss, head_loss.detach(), hits, base_loss.detach(), base_kl.detach())

    @torch.no_grad()
    def _original(self, batch: Batch) -> Tensor:
        """(n, V) logits of the base as it was."""
        with self.base.disable_adapter():
            return self._scores(batch.states(self._decoder(batch.tokens).last_hidden_state))

    def merged(self) -> Any:
        """The base with the adapter added to its weights; this trainee is of no use afterwards."""
        return self.base.merge_and_unload()
