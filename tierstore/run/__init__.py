"""One run directory: manifests, commits, recovery."""
