"""``python -m tierstore.cli``."""

from tierstore.cli import app

app()
