"""Answers about a training run before it begins, from the shapes of a model without its weights."""
