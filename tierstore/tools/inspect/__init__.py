"""Content and verification of runs and checkpoints."""
