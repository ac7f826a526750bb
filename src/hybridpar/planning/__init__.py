"""What a model would cost on a cluster, before it runs."""
