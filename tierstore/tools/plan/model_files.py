"""Models from files: a ``config.json``, or a listing of parameters as JSON.

A listing is an object with the names of parameters, in the order of ``named_parameters()``, and for
each its shape: ``{"up.weight": [8, 4]}``, or with a dtype,
``{"up.weight": {"shape": [8, 4], "dtype": "bfloat16"}}``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierstore.errors import CorruptionError, PlanError, StorageError
from tierstore.layout.records import RECORD_DIMENSIONS_MAX
from tierstore.run.sealed import parse_json
from tierstore.storage.paths import Entry, get_file
from tierstore.tools.plan.config_values import shown
from tierstore.tools.plan.families import MODEL_EXPECTED, config_of
from tierstore.tools.plan.model_configs import parameters_of
from tierstore.tools.plan.models import DTYPES, ELEMENTS_MAX, Model, ModelParameter
from tierstore.units import format_bytes

FILE_BYTES_MAX = 16 * 2**20
"""Most bytes of a file: a listing of 100,000 parameters has about 10 MiB."""

PARAMETERS_MAX = 2**18
"""Most parameters of a listing: Kimi K2 with each expert apart has 70,000."""

_CONFIG = "config.json"


def read_model(path: str | os.PathLike[str]) -> Model:
    """Return the model that a file describes; only this file is read, and no weights.

    Args:
        path: a config, a listing, a directory with a ``config.json``, or the name of a model; see
            ``config_of()``. Links are followed: caches of downloads consist of them.

    Raises:
        PlanError: it cannot be read, is not such a file, or describes no model that is known.
    """
    config = config_of(path)
    if config is not None:
        return Model(os.fspath(path).lower(), parameters_of(config).parameters)
    file = Path(path, _CONFIG) if os.path.isdir(path) else Path(path)
    values = _object_of(_content(file), f"{file}")
    if "model_type" not in values:
        return _listed(values, f"{file}")
    try:
        return parameters_of(values)
    except PlanError as error:
        raise PlanError(f"{file}: {error}") from error


def model_from_listing(listing: str | Mapping[str, Any]) -> Model:
    """Return the model whose parameters a listing names, as JSON or as the value of it.

    A parameter without a dtype is float32.

    Raises:
        PlanError: it is not a listing.
    """
    if isinstance(listing, str):
        listing = _object_of(listing.encode(errors="replace"), "the listing")
    return _listed(listing, "the listing")


def _content(file: Path) -> bytes:
    """Return the bytes of a file that is not too long."""
    try:
        target = Path(os.path.realpath(file))
        nbytes = target.stat().st_size
        data = get_file(Entry.of(target)) if nbytes <= FILE_BYTES_MAX else None
    except (OSError, ValueError, StorageError, CorruptionError) as error:
        raise PlanError(f"{file} cannot be read ({error}): {MODEL_EXPECTED}") from error
    if data is None:
        raise PlanError(
            f"{file} has {format_bytes(nbytes)}, at most {format_bytes(FILE_BYTES_MAX)} are read: "
            f"{MODEL_EXPECTED}"
        )
    return data


def _object_of(data: bytes, where: str) -> Mapping[str, Any]:
    """Return the object that a text of JSON is."""
    try:
        values = parse_json(data)
    except ValueError as error:
        raise PlanError(
            f"{where} is not JSON with every key once ({error}): give a config or a listing"
        ) from error
    if not isinstance(values, dict):
        raise PlanError(
            f"{where} is {shown(values)}, expected an object of JSON: give a config or a listing"
        )
    return values


def _listed(listing: Mapping[str, Any], where: str) -> Model:
    """Return the parameters of a listing."""
    if len(listing) > PARAMETERS_MAX:
        raise PlanError(
            f"{where} has {len(listing)} parameters, expected at most {PARAMETERS_MAX}: stack "
            "the parameters of experts"
        )
    return Model(where, tuple(_parameter(*item, where) for item in listing.items()))


def _parameter(name: str, value: Any, where: str) -> ModelParameter:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise PlanError(
            f"{where} has the name {shown(name)}, expected printable text: list the names of "
            "named_parameters()"
        )
    fields = value if isinstance(value, Mapping) else {"shape": value}
    shape, dtype = fields.get("shape"), fields.get("dtype", "float32")
    if (
        not isinstance(shape, list | tuple)
        or len(shape) > RECORD_DIMENSIONS_MAX
        or not all(type(size) is int and 0 <= size <= ELEMENTS_MAX for size in shape)
        or (0 in shape and math.prod(size or 1 for size in shape) > ELEMENTS_MAX)
    ):
        raise PlanError(
            f"{where} has {shown(name)} with the shape {shown(shape)}, expected at most "
            f"{RECORD_DIMENSIONS_MAX} sizes such as [4096, 1024]: list the shapes of parameters, "
            "or give a config with its model_type"
        )
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise PlanError(
            f"{where} has {shown(name)} with the dtype {shown(dtype)}, expected one of "
            f"{', '.join(DTYPES)}: list the dtypes that the model is trained in"
        )
    return ModelParameter(name, tuple(shape), DTYPES[dtype])
