"""Which bytes of which page are what: arithmetic without I/O."""
