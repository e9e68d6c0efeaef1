"""Train heads for a model that has none: Medusa-1, Hydra, EAGLE-3, DFlash."""
