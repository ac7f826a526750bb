"""The trainers' part of checkpoints."""
