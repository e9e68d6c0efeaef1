"""Models, drafters and what is measured with them."""

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its warnings say what messages here say in the user's words
