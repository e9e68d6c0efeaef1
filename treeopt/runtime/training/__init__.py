"""Train heads for a model that has none: Medusa-1, Hydra, Hydra++, EAGLE-3, DFlash."""
