"""How results are kept: written whole or not at all, journaled, with where they come from."""
