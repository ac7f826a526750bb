"""What a checkpoint is on a disk: its files, its manifest, and the folders they are in."""
