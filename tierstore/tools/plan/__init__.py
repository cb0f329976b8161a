"""Plans of training runs, from the shapes of a model without its weights."""
