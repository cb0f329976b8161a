"""Conversion of checkpoints from one format to another, in bounded memory."""
