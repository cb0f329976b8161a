"""Kernels of native/cpu_kernels.cpp. Tensors are addresses; a bool says that one is bfloat16."""

def momentum(
    grad: int,
    grad_is_bfloat16: bool,
    buffer: int,
    buffer_is_bfloat16: bool,
    out: int,
    out_is_bfloat16: bool,
    numel: int,
    momentum: float,
    nesterov: bool,
    maximize: bool,
    threads: int,
) -> None: ...
def muon(
    master: int,
    parameter: int,
    update: int,
    update_is_bfloat16: bool,
    numel: int,
    decay: float,
    alpha: float,
    threads: int,
) -> bool: ...
def adamw(
    master: int,
    parameter: int,
    grad: int,
    grad_is_bfloat16: bool,
    mean: int,
    mean_sq: int,
    numel: int,
    decay: float,
    beta1: float,
    beta2: float,
    size: float,
    epsilon: float,
    maximize: bool,
    threads: int,
) -> bool: ...
def random_bits(
    rows: int, out: int, rows_numel: int, first_column: int, columns: int, threads: int
) -> None: ...
