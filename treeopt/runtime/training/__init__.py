"""Train heads for a model that has none: Medusa-1, Medusa-2, Hydra, Hydra++, EAGLE-3, DFlash.

recipe.py     what is trained and how: schedules of the learning rate and of the loss's parts
batches.py    texts as tensors: which states there are, and which tokens are to be guessed there
trainees.py   the heads on a frozen base, or with it (Medusa-2), as one module that turns a batch into a loss; the losses
loop.py       steps, counting on held-out texts, and checkpoints: a run that was stopped ends in the same weights
opening.py    what a run begins with, the texts that heads learn from among it, and the files that it ends with
"""
