"""What runs in a trainer process: the model, its lookups and pushes, and the training loop."""
