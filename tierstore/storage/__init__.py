"""Byte storage for one directory."""

from tierstore.storage.base import Storage, Transfer
from tierstore.storage.select import open_storage
from tierstore.units import Extent

__all__ = ["Extent", "Storage", "Transfer", "open_storage"]
