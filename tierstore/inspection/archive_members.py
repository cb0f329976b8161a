"""Positions of the members of zip archives in a file. Their data is read in place."""

from __future__ import annotations

import struct
import zipfile

from tierstore.errors import CorruptionError
from tierstore.inspection.reader import File

_UTF_8 = 0x800
"""The flag of a member whose name is UTF-8."""


def member_start(file: File, entry: zipfile.ZipInfo, begin: int, end: int) -> int:
    """Return the byte of a file at which the data of a member of an archive begins.

    Args:
        file: the file.
        entry: the member.
        begin: the byte at which the archive begins.
        end: the byte at which the archive ends.

    Raises:
        CorruptionError: the data does not follow the header of this member, or is not within the
            archive.
    """
    name = entry.orig_filename.encode("utf-8" if entry.flag_bits & _UTF_8 else "cp437")
    header = file.read(begin + entry.header_offset, 30 + len(name))
    # The extra field may be longer in this header than in the list of members.
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    if header[:4] != b"PK\3\4" or (name_length, header[30:]) != (len(name), name):
        raise CorruptionError(f"has no header of its member {entry.filename!r} where it should be")
    start = begin + entry.header_offset + 30 + int(name_length + extra_length)
    if entry.header_offset < 0 or start + entry.file_size > end:
        raise CorruptionError(f"ends before its member {entry.filename!r} does")
    return start
