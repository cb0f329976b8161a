"""What a user who adds a storage tests it with: a conformance suite and injected faults."""
