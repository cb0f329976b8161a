"""Pages between file, buffer and device."""
