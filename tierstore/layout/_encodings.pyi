"""Kernels of native/encodings.cpp. Tensors are addresses."""

def decode_split_8(
    parameter: int, remainder: int, values: int, numel: int, threads: int
) -> None: ...
def decode_split_16(
    parameter: int, remainder: int, values: int, numel: int, threads: int
) -> None: ...
def encode_split_8(
    values: int, parameter: int, remainder: int, numel: int, threads: int
) -> None: ...
def encode_split_16(
    values: int, parameter: int, remainder: int, numel: int, threads: int
) -> None: ...
def decode_int8(
    numbers: int, scales: int, values: int, rows: int, columns: int, threads: int
) -> None: ...
def decode_uint8(
    numbers: int, scales: int, values: int, rows: int, columns: int, threads: int
) -> None: ...
def encode_int8(
    values: int,
    chances: int,
    numbers: int,
    scales: int,
    rows: int,
    columns: int,
    threads: int,
) -> None: ...
def encode_uint8(
    values: int,
    chances: int,
    numbers: int,
    scales: int,
    rows: int,
    columns: int,
    threads: int,
) -> None: ...
