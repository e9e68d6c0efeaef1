"""Records: the types of results, and their files."""
