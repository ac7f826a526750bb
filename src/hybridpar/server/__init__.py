"""What runs in a parameter server process: the slabs of rows, their updates, and the calls."""
