"""Files of runs and checkpoints, read without trusting them."""
