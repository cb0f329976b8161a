"""For authors of a storage: conformance suite and fault injection."""
