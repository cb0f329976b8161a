"""Muon in the training loops of other libraries: one module for each of them."""
