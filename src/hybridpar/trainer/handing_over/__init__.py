"""To a plain module and back, and rows written by hand."""
