"""Train heads for a model that has none: Medusa-1, Medusa-2, Hydra, Hydra++.

recipe.py     what is trained and how: schedules of the learning rate and of the loss's parts
texts.py      the texts that heads learn from: the model's own answers, or given ones
batches.py    texts as tensors: which states there are, and which tokens are to be guessed there
losses.py     the losses, as sums over states
trainees.py   the heads on a frozen base, as one module that turns a batch into a loss
medusa2.py    the base and its heads together: LoRA, and the distance to the original base
loop.py       steps, and counting on held-out texts
checkpoint.py a run that was stopped goes on where it was, and ends in the same weights
"""
