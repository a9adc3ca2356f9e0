"""Options of every command, each declared once, and what is checked of their values."""
