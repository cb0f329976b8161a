"""Checkpoints: published, retained, verified, loaded, restored."""
