# Addresses of tensors, and sizes; `hybridpar.kernels.compiled` says what of.
def add_bags(
    target: int, num_rows: int, width: int, rows: int, count: int, offsets: int, num_bags: int,
    values: int, factor: float, part: int, parts: int, /,
) -> None: ...  # fmt: skip
def first_beyond(rows: int, count: int, limit: int, /) -> int: ...
def in_order(starts: int, num_bags: int, count: int, /) -> bool: ...
def number_bags(starts: int, num_bags: int, count: int, first: int, out: int, /) -> None: ...
def shift(rows: int, count: int, by: int, out: int, /) -> None: ...
def gather(source: int, num_rows: int, width: int, rows: int, count: int, out: int, /) -> None: ...
def group(
    rows: int, bags: int, count: int, part: int, parts: int, distinct: int, starts: int,
    order: int, /,
) -> tuple[int, int]: ...  # fmt: skip
def step_rows(
    rule: int, table: int, num_rows: int, width: int, first: int, first_width: int, second: int,
    second_width: int, rows: int, starts: int, found: int, bags: int, total: int, sources: int,
    num_bags: int, factor: float, lr: float, eps: float, decay: float, shrink: float, beta1: float,
    beta2: float, root_correction: float, /,
) -> None: ...  # fmt: skip
