"""What people look at: the terminal, the pictures, the page."""
