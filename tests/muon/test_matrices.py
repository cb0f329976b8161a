"""Logical matrices: parameters that hold several, against the same matrices as parameters."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import muon
import tierstore
from muon.matrices import Declaration, declared, matrices_of, unit_of
from tierstore.layout.chunks import Chunk

STEPS = 4


def pieces(whole: torch.Tensor, declaration: Declaration) -> list[torch.Tensor]:
    """Cut a tensor as declared, with views of torch alone; each piece is a matrix."""
    found, row_dimensions = [whole], 1
    for kind, *arguments in declaration:
        match kind, arguments:
            case "split", (dim, sizes):
                found = [one for each in found for one in each.split(list(sizes), dim)]
            case "blocks", (dim, size):
                found = [one for each in found for one in each.split(size, dim)]
            case "interleaved", (dim, count):
                found = [
                    each.unflatten(dim, (-1, count)).select(dim + 1, index)
                    for each in found
                    for index in range(count)
                ]
            case "stack", ():
                row_dimensions = whole.ndim - 1
                for dim in range(whole.ndim - 2):
                    found = [one for each in found for one in each.split(1, dim)]
            case "flatten", ():
                row_dimensions = 1
            case "transposed", ():
                pass
    return [each.flatten(row_dimensions).flatten(0, row_dimensions - 1) for each in found]


CASES: dict[str, tuple[tuple[int, ...], Declaration]] = {
    "one": ((12, 20), ()),
    "grouped queries": ((32, 20), (("split", 0, (16, 8, 8)),)),
    "heads": ((32, 20), (("blocks", 0, 8),)),
    "heads of grouped queries": ((32, 20), (("split", 0, (16, 8, 8)), ("blocks", 0, 4))),
    "pairs of heads": ((32, 20), (("blocks", 0, 16),)),
    "gate and up": ((24, 10), (("interleaved", 0, 2),)),
    "columns": ((10, 30), (("split", 1, (10, 10, 10)),)),
    "Conv1D": ((10, 24), (("split", 1, (8, 8, 8)), ("transposed",))),
    "experts": ((6, 8, 10), (("stack",),)),
    "experts, gate and up": ((4, 16, 10), (("stack",), ("blocks", 1, 8))),
    "interleaved experts": ((4, 16, 10), (("stack",), ("interleaved", 1, 2))),
    "stack of stacks": ((2, 3, 8, 10), (("stack",),)),
    "convolution": ((12, 5, 3, 3), (("flatten",),)),
    "grouped convolution": ((12, 5, 3), (("blocks", 0, 4), ("flatten",))),
    "interleaved columns": ((8, 12), (("interleaved", 1, 3), ("blocks", 0, 4))),
}
case = pytest.mark.parametrize(("shape", "declaration"), CASES.values(), ids=CASES)


@case
def test_the_matrices_equal_views(shape: tuple[int, ...], declaration: Declaration) -> None:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    everything = Chunk((0,) * len(shape), shape)
    matrices, expected = matrices_of(shape, declaration), pieces(whole, declaration)
    assert [m.shape for m in matrices] == [tuple(piece.shape) for piece in expected]
    for matrix, piece in zip(matrices, expected, strict=True):
        part = matrix.part(everything)
        assert part is not None
        assert torch.equal(whole[part.index].reshape(piece.shape), piece)


@given(st.sampled_from(sorted(CASES)), st.data())
def test_parts_of_any_chunks_make_up_the_matrices(name: str, data: st.DataObject) -> None:
    shape, declaration = CASES[name]
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    bounds = [
        [0, *sorted(data.draw(st.sets(st.integers(1, size - 1), max_size=3))), size]
        for size in shape
    ]
    chunks = [
        Chunk(tuple(a for a, _ in each), tuple(b - a for a, b in each))
        for each in itertools.product(*map(itertools.pairwise, bounds))
    ]
    for matrix, piece in zip(
        matrices_of(shape, declaration), pieces(whole, declaration), strict=True
    ):
        found = torch.full(matrix.shape, -1)
        for chunk in chunks:
            part = matrix.part(chunk)
            if part is not None:
                target = part.chunk.select(found.view(matrix.sizes))
                assert (target == -1).all()
                target.copy_(chunk.select(whole)[part.index])
        assert torch.equal(found, piece)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("one", None),
        ("grouped queries", None),
        ("heads", 8),
        ("heads of grouped queries", 4),
        ("gate and up", None),
        ("columns", None),
        ("experts", 1),
        ("experts, gate and up", 1),
        ("stack of stacks", 1),
        ("convolution", None),
        ("grouped convolution", 4),
    ],
)
def test_pages_cut_between_matrices_of_equal_rows(name: str, unit: int | None) -> None:
    assert unit_of(*CASES[name]) == unit


def gradients(shape: tuple[int, ...], step: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9}


def stepped_apart(
    shape: tuple[int, ...], declaration: Declaration, dtype: torch.dtype, **options: Any
) -> torch.Tensor:
    """Step each matrix as a parameter of its own; return them in the shape of all."""
    whole = gradients(shape, 0).to(dtype)
    parameters = [
        torch.nn.Parameter(piece.clone().contiguous()) for piece in pieces(whole, declaration)
    ]
    optimizer = muon.Muon(parameters, **OPTIONS, **options)
    for step in range(1, STEPS + 1):
        grads = pieces(gradients(shape, step).to(dtype), declaration)
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.clone().contiguous()
        optimizer.step()
    places = pieces(torch.arange(whole.numel()).reshape(shape), declaration)
    found = torch.empty(whole.numel(), dtype=dtype)
    for place, parameter in zip(places, parameters, strict=True):
        found[place.flatten()] = parameter.detach().flatten()
    return found.reshape(shape)


def stepped_together(
    shape: tuple[int, ...],
    declaration: Declaration,
    dtype: torch.dtype,
    store: tierstore.TierStore | None = None,
    **options: Any,
) -> torch.Tensor:
    parameter = torch.nn.Parameter(gradients(shape, 0).to(dtype))
    group = {"params": [("w", parameter)], "matrices": declaration}
    optimizer = muon.Muon([group], store=store, **OPTIONS, **options)
    for step in range(1, STEPS + 1):
        parameter.grad = gradients(shape, step).to(dtype)
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@case
def test_equals_separate_parameters(
    shape: tuple[int, ...],
    declaration: Declaration,
    dtype: torch.dtype,
    on_disk: bool,
    tmp_path: Path,
) -> None:
    upright = tuple(cut for cut in declaration if cut != ("transposed",))
    options = {} if upright == declaration else {"adjust_lr_fn": "match_rms_adamw"}
    expected = stepped_apart(shape, declaration, dtype, **options)
    directory = tmp_path if on_disk else None
    with tierstore.TierStore(directory, page_bytes=4096, buffers=3) as store:
        found = stepped_together(shape, declaration, dtype, store, **options)
    assert torch.equal(found, expected)


def test_the_scale_follows_from_outputs_and_inputs() -> None:
    """A Conv1D has the transposed weight of a Linear, whose update is the transposed one."""
    shape = (10, 24)
    found = stepped_together(shape, (("transposed",),), torch.float32, ns_dtype=torch.float64)
    parameter = torch.nn.Parameter(gradients(shape, 0).T.contiguous())
    optimizer = muon.Muon([parameter], **OPTIONS, ns_dtype=torch.float64)
    for step in range(1, STEPS + 1):
        parameter.grad = gradients(shape, step).T.contiguous()
        optimizer.step()
    torch.testing.assert_close(found.T, parameter.detach(), rtol=1e-6, atol=1e-7)


def test_a_run_resumes_with_its_matrices(tmp_path: Path) -> None:
    shape, declaration = CASES["experts, gate and up"]
    expected = stepped_together(shape, declaration, torch.float32)
    for resume in (False, True):
        parameter = torch.nn.Parameter(gradients(shape, 0))
        with tierstore.TierStore(tmp_path, page_bytes=4096, buffers=3, resume=resume) as store:
            lists = [["stack"], ["blocks", 1, 8]]  # As from a file of JSON.
            group = {"params": [("w", parameter)], "matrices": lists if resume else declaration}
            optimizer = muon.Muon([group], store=store, **OPTIONS)
            first = optimizer.restore() + 1 if resume else 1
            for step in range(first, 5 if resume else 3):
                parameter.grad = gradients(shape, step)
                optimizer.step()
            assert declared(optimizer.param_groups[0]) == declaration
    assert torch.equal(parameter, expected)


@pytest.mark.parametrize(
    ("shape", "declaration", "message"),
    [
        ((4, 5, 6), (), r"'w' has shape \(4, 5, 6\): Muon needs two-dimensional .*declare its"),
        ((4,), (), "Muon needs two-dimensional"),
        ((8, 6), (("split", 0, (4, 3)),), r"a split into \[4, 3\] does not fit the 8 indices"),
        ((8, 6), (("split", 0, (8, 0)),), "does not fit the 8 indices of dimension 0"),
        ((8, 6), (("blocks", 0, 3),), "blocks of 3 do not fit the 8 indices of dimension 0"),
        ((8, 6), (("blocks", 2, 3),), "'blocks' is of dimension 2, but the parameter has 2"),
        ((8, 6), (("interleaved", 0, 3),), "3 interleaved matrices do not fit the 8 indices"),
        (
            (8, 6),
            (("stack",),),
            "'w' has shape .* a stack of matrices has three dimensions",
        ),
        ((8, 6), (("halves", 0),), "matrices must be a tuple of cuts, .*, got .*'halves'"),
        ((8, 6), (("split", 0),), "matrices must be a tuple of cuts"),
        ((8, 6), (("split", 0, (2.0, 6.0)),), "matrices must be a tuple of cuts"),
        ((8, 6), (("blocks", True, 2),), "matrices must be a tuple of cuts"),
        ((8, 6), (("flatten", 1),), "matrices must be a tuple of cuts"),
        ((8, 6), ((),), "matrices must be a tuple of cuts"),
        ((8, 6), ("stack",), "matrices must be a tuple of cuts"),
        ((8, 6), "stack", "matrices must be a tuple of cuts"),
        ((8, 6), {("blocks", 0, 2)}, "matrices must be a tuple of cuts"),
        ((8, 6), (cut for cut in [("blocks", 0, 2)]), "matrices must be a tuple of cuts"),
        ((8, 6), torch.tensor([1, 2]), "matrices must be a tuple of cuts"),
        ((8, 6), 3, "matrices must be a tuple of cuts"),
        ((8, 6), (3,), "matrices must be a tuple of cuts"),
    ],
)
def test_a_declaration_that_does_not_fit(
    shape: tuple[int, ...], declaration: Any, message: str
) -> None:
    parameter = torch.nn.Parameter(torch.ones(shape))
    with pytest.raises(ValueError, match=message):
        muon.Muon([{"params": [("w", parameter)], "matrices": declaration}])


@pytest.mark.parametrize("other", [None, (("blocks", 0, 32),), (("blocks", 0, 7),)])
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_declaration_cannot_change(on_disk: bool, other: Any, tmp_path: Path) -> None:
    """Pages are cut between matrices: other ones would lie in several."""
    parameter = torch.nn.Parameter(gradients((64, 32), 0))
    group = {"params": [("w", parameter)], "matrices": (("blocks", 0, 8),)}
    with tierstore.TierStore(tmp_path if on_disk else None, page_bytes=4096, buffers=3) as store:
        optimizer = muon.Muon([group], store=store, **OPTIONS)
        parameter.grad = gradients((64, 32), 1)
        optimizer.step()
        before = parameter.detach().clone()
        kept = optimizer.param_groups[0].pop("matrices")
        if other is not None:
            optimizer.param_groups[0]["matrices"] = other
        with pytest.raises(
            ValueError, match=r"has matrices=.* another value when the group was added"
        ):
            optimizer.step()
        assert torch.equal(parameter, before)
        optimizer.param_groups[0]["matrices"] = kept
        optimizer.step()
        assert not torch.equal(parameter, before)


def test_a_restored_run_has_the_declaration_of_the_program(tmp_path: Path) -> None:
    for resume, declaration in ((False, (("split", 0, (8, 24)),)), (True, None)):
        parameter = torch.nn.Parameter(gradients((32, 20), 0))
        group: dict[str, Any] = {"params": [("w", parameter)]}
        if declaration is not None:
            group["matrices"] = declaration
        with tierstore.TierStore(tmp_path, resume=resume) as store:
            optimizer = muon.Muon([group], store=store, **OPTIONS)
            if resume:
                optimizer.restore()
            assert declared(optimizer.param_groups[0]) == (declaration or ())
            parameter.grad = gradients((32, 20), 1)
            optimizer.step()


@pytest.mark.parametrize(
    ("shape", "declaration"),
    [((0, 4), (("blocks", 0, 2),)), ((0, 4, 4), (("stack",),)), ((0, 4), (("interleaved", 0, 2),))],
)
def test_a_parameter_without_elements(shape: tuple[int, ...], declaration: Declaration) -> None:
    parameter = torch.nn.Parameter(torch.ones(shape))
    other = torch.nn.Parameter(torch.ones(4, 4))
    other.grad = torch.ones(4, 4)
    group = {"params": [parameter], "matrices": declaration}
    muon.Muon([group, {"params": [other]}]).step()


def test_adamw_groups_have_no_matrices() -> None:
    group = {"params": [torch.nn.Parameter(torch.ones(4, 4))], "algorithm": "adamw"}
    with pytest.raises(ValueError, match="matrices is not a key of algorithm='adamw'"):
        muon.Muon([{**group, "matrices": (("stack",),)}])
