"""What is worth knowing beside a result: the library logs it under "treeopt", and commands print it.

A script sees it, and progress bars, with ``logging.basicConfig()`` and ``logging.getLogger("treeopt").setLevel("INFO")``.
"""

import logging

from treeopt.errors import spoken

LOGGER = logging.getLogger("treeopt")


def note(*messages: str | None) -> None:
    """Log the sentences; None is no sentence."""
    for message in filter(None, messages):
        LOGGER.info("%s", spoken(message))
