"""Places of elements in pages: arithmetic without I/O."""
