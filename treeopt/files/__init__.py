"""Files: read within bounds and checked, written whole or not at all, and journals of unfinished measurements."""
