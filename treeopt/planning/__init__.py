"""The choice: tokens per step over milliseconds per step."""
