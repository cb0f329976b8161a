"""Imports that the server of forked processes makes once for all of them."""

from __future__ import annotations

import gc

import tierstore.cli
import tierstore.inspection.verify
import tierstore.storage.uring  # noqa: F401

# A garbage collection in a forked process would touch, and so copy, all of these objects.
gc.freeze()
