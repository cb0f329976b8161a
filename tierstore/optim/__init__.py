"""Optimizers whose states are in the pages of a store."""
