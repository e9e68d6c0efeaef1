"""Find the best speculation tree for Medusa-style decoding, and prove it by real decoding."""

__version__ = "0.1.0"
