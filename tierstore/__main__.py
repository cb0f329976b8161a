"""``python -m tierstore``."""

from tierstore.cli import app

app(prog_name="tierstore")  # Also the name that shell completion is installed for.
