"""Values of files of torch.save that are odd, hostile, or not tensors."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.support.conversions import no_trace
from tierstore.convert.convert import convert


def refused(value: Any, tmp_path: Path, match: str) -> None:
    torch.save(value, tmp_path / "in.pt")
    with no_trace(tmp_path), pytest.raises(tierstore.CorruptionError, match=match):
        convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch")


def with_pickle(path: Path, pickled: bytes) -> None:
    """Write a file of torch.save with one tensor and a pickle of our own."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("in/data.pkl", pickled)
        archive.writestr("in/data/0", bytes(8))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.view_as_complex(torch.ones(2, 2)).conj().imag,
    ],
)
def test_lazy_conjugation_and_negation_are_refused(tensor: torch.Tensor, tmp_path: Path) -> None:
    refused({"w": tensor}, tmp_path, r"resolve_conj\(\).resolve_neg\(\)")
    torch.save({"w": tensor.resolve_conj().resolve_neg()}, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch")
    found = torch.load(tmp_path / "out.pt")["model"]["w"]
    assert torch.equal(found, tensor.resolve_conj().resolve_neg())


def test_values_in_many_places_at_once(tmp_path: Path) -> None:
    nested: Any = [1]
    for _ in range(40):
        nested = [nested, nested]
    refused({"w": torch.ones(2), "x": nested}, tmp_path, "in very many places at once")
    group = {"params": [0], "x": nested}
    refused({"param_groups": [group], "state": {}}, tmp_path, "in very many places at once")
    nested.append(nested)
    refused({"w": torch.ones(2), "x": nested}, tmp_path, "in themselves")


HOSTILE = {
    "a device of a list": (b"ctorch\ndevice\n", b"(" + b"](" + b"K\1" * 9 + b"et", b"R"),
    "a set of tuples": (b"cbuiltins\nset\n", b"](K\1K\1\x86e\x85", b"R"),
    "a key of a dict of pairs": (b"ccollections\nOrderedDict\n", b"](K\1K\1\x86e\x85", b"R"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_arguments_that_are_refused(name: str, tmp_path: Path) -> None:
    with_pickle(tmp_path / "in.pt", b"\x80\x02}X\1\0\0\0a" + b"".join(HOSTILE[name]) + b"s.")
    with no_trace(tmp_path), pytest.raises(tierstore.CorruptionError, match=r"in\.pt"):
        convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch")


def test_arguments_are_not_copied_without_end(tmp_path: Path) -> None:
    """Each call names the same list of 1,000 items again."""
    items = b"](" + b"K\1" * 1000 + b"eq\1"
    call = b"ctorch\nSize\nh\1\x85R0"
    with_pickle(tmp_path / "in.pt", b"\x80\x02" + items + call * 1000 + b".")
    with no_trace(tmp_path), pytest.raises(tierstore.CorruptionError, match="larger than itself"):
        convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch")


def test_a_pickle_imports_no_module(tmp_path: Path) -> None:
    with_pickle(tmp_path / "in.pt", b"\x80\x02}X\1\0\0\0actorch\n_inductor\ns.")
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from tierstore.inspection.torch_archive import read_torch_bytes\n"
        "before = 'torch._inductor' in sys.modules\n"
        "read_torch_bytes(Path(sys.argv[1]).read_bytes(), 'here')\n"
        "assert not before and 'torch._inductor' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "in.pt"], check=True)
