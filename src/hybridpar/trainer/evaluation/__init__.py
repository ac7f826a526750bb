"""Evaluation: once, or while training, until that is enough."""
