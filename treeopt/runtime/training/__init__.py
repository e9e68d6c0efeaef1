"""Train heads for a model that has none: Medusa-1, Medusa-2, Hydra, Hydra++, EAGLE-3, DFlash."""
