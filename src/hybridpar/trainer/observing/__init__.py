"""What callbacks are told, and where the time goes."""
