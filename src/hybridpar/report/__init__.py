"""The HTML page on a run: what is collected of it, and how it is drawn."""
