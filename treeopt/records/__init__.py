"""What is kept: one type, one file."""
