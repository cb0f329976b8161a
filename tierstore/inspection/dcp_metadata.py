"""The ``.metadata`` of a checkpoint, read without running code from it."""

from __future__ import annotations

import io

from torch.distributed.checkpoint.metadata import Metadata

from tierstore.errors import CorruptionError
from tierstore.inspection.safe_pickle import load_pickle


def read_metadata(data: bytes, where: str) -> Metadata:
    """Return the ``Metadata`` in the ``.metadata`` of a checkpoint.

    Checks that every tensor has a dtype, a size and chunks of as many dimensions, and that every
    storage entry has a path and a range of bytes. Does not check that these fit the files.

    Args:
        data: the content of the file.
        where: the name of the file in errors.

    Raises:
        CorruptionError: the file is damaged, or has content that is not in a stock checkpoint.
    """
    try:
        value: Metadata = load_pickle(io.BytesIO(data), len(data), stand_ins=False)
        if type(value) is not Metadata:
            raise CorruptionError("does not hold the metadata of a checkpoint")
    except CorruptionError as error:
        raise CorruptionError(f"{where} {error}; nothing of it was used") from error
    return value
