"""``python -m tierstore.tools``."""

from tierstore.tools.cli import app

app(prog_name="tierstore")  # Also the name that shell completion is installed for.
