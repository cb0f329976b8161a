"""Values of files of torch.save that are odd, hostile, or not tensors."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
import time
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.support.commands import call
from tests.support.conversions import no_trace
from tierstore.errors import CheckpointError
from tierstore.tools.convert import torch_archive
from tierstore.tools.convert.convert import convert


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
    refused({"w": torch.ones(2), "x": nested}, tmp_path, "shared too often")
    group = {"params": [0], "x": nested}
    refused({"param_groups": [group], "state": {}}, tmp_path, "shared too often")
    nested.append(nested)
    refused({"w": torch.ones(2), "x": nested}, tmp_path, "a reference cycle")


def test_archives_of_others_are_refused(tmp_path: Path) -> None:
    for names in (["a.txt"], ["a/data.pkl", "b/data.pkl"]):
        with zipfile.ZipFile(tmp_path / "in.pt", "w") as archive:
            for name in names:
                archive.writestr(name, b"\x80\x02}.")
        with no_trace(tmp_path), pytest.raises(tierstore.CorruptionError, match="zip archive with"):
            convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch")


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
    """Each call names the same 60 items again."""
    items = b"(" + b"K\1" * 60 + b"tq\1"
    call = b"ctorch\nSize\nh\1\x85R0"
    with_pickle(tmp_path / "in.pt", b"\x80\x02" + items + call * 3000 + b".")
    with no_trace(tmp_path), pytest.raises(tierstore.CorruptionError, match="larger than itself"):
        convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch")


def test_values_are_not_made_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list for each byte of the pickle; a file may have more values the more tensors it has."""
    monkeypatch.setattr(torch_archive, "_OPCODES_MIN", 1000)
    with_pickle(tmp_path / "in.pt", b"\x80\x02" + b"]" * 1600 + b".")
    with no_trace(tmp_path), pytest.raises(tierstore.CorruptionError, match="many more values"):
        convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch")
    torch.save({f"w{number}": torch.ones(1) for number in range(1000)}, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch")


def test_a_long_text_for_the_byte_order(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "in.pt", "w") as archive:
        archive.writestr("in/data.pkl", b"\x80\x02}.")
        archive.writestr("in/byteorder", bytes(32 * 2**20))
    tracemalloc.start()
    with pytest.raises(tierstore.CorruptionError, match="another byte order"):
        convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 16 * 2**20


def unicode(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


COUNT = 30_000
TENSOR_CALL = b"ctorch._utils\n_rebuild_tensor_v2\n"
STORAGE = b"(" + unicode("storage") + b"ctorch\nFloatStorage\n" + unicode("0") + b"tQ"
LONG_DICT = b"}(" + b"".join(b"J" + struct.pack("<i", n) + b"N" for n in range(COUNT)) + b"uq\1"
LONG_TUPLE = b"(" + b"K\1" * COUNT + b"tq\1"
# A value of some size, and what names it again and again.
AGAIN = {
    "attributes of objects with slots": (
        LONG_DICT,
        b"ctorch._tensor\n_rebuild_from_type_v2\n" + b"(cm\nf\ncm\nc\n)" + b"h\1}\x86" + b"tR0",
    ),
    "arguments": (LONG_TUPLE, b"cm\nf\nh\1R0"),
    "arguments that are a list": (b"](" + b"K\1" * COUNT + b"eq\1", b"cm\nf\nh\1R0"),
    "a key": (LONG_TUPLE, b"}h\1Ns0"),
    "a key of a dict of another opcode": (LONG_TUPLE, b"(h\1Nd0"),
    "a key that is a large number": (
        b"\x8b" + struct.pack("<i", COUNT) + b"\1" * COUNT + b"q\1",
        b"}h\1Ns0",
    ),
    "a storage": (
        b"("
        + unicode("storage")
        + b"ctorch\nFloatStorage\n"
        + unicode("0")
        + b"K\1" * COUNT
        + b"tq\1",
        b"h\1Q0",
    ),
}


@pytest.mark.parametrize("name", AGAIN)
def test_time_is_not_the_square_of_the_size(name: str, tmp_path: Path) -> None:
    """The pickle would visit a thousand million items, which takes minutes; it is refused."""
    once, again = AGAIN[name]
    with_pickle(tmp_path / "in.pt", b"\x80\x02" + once + again * COUNT + b".")
    start = time.process_time()
    with no_trace(tmp_path), pytest.raises(tierstore.CorruptionError):
        convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch")
    assert time.process_time() - start < 10


def test_attributes_of_tensors_are_not_compared(tmp_path: Path) -> None:
    """Two tensors at one place with equal attributes, each of which has 2 ** 40 paths to a leaf."""

    def tensor_with_attributes() -> bytes:
        nested = b"]" + b"q\2" + b"".join(b"0](h\2h\2eq\2" for _ in range(40))
        inner = b"(" + STORAGE + b"K\0K\2\x85K\1\x85\x89}t"
        state = b"}" + unicode("x") + nested + b"s"
        return (
            b"ctorch._tensor\n_rebuild_from_type_v2\n("
            + TENSOR_CALL
            + b"cm\nc\n"
            + inner
            + state
            + b"tR"
        )

    pickled = b"\x80\x02}" + b"".join(
        unicode(name) + tensor_with_attributes() + b"s" for name in ("v", "w")
    )
    with_pickle(tmp_path / "in.pt", pickled + b".")
    convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch")
    assert torch.load(tmp_path / "out.pt")["model"].keys() == {"v", "w"}


@pytest.mark.long
def test_a_pickle_imports_no_module(tmp_path: Path) -> None:
    with_pickle(tmp_path / "in.pt", b"\x80\x02}X\1\0\0\0actorch\n_inductor\ns.")
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from tierstore.tools.convert.torch_archive import read_torch_bytes\n"
        "before = 'torch._inductor' in sys.modules\n"
        "read_torch_bytes(Path(sys.argv[1]).read_bytes(), 'here')\n"
        "assert not before and 'torch._inductor' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "in.pt"], check=True)


def optimizer_of(state: Any, **group: Any) -> dict[str, Any]:
    groups = [{"lr": 0.1, "params": [0], "param_names": ["w"], **group}]
    return {"state": {0: state}, "param_groups": groups}


def file_of(state: Any, **group: Any) -> dict[str, Any]:
    return {"model": {"w": torch.arange(3.0)}, "optimizer": optimizer_of(state, **group)}


def test_a_dict_of_tensors_in_a_model_is_not_the_model(tmp_path: Path) -> None:
    extra = {"amax": torch.ones(2)}
    model = {"w": torch.randn(2), "b": torch.randn(3), "l._extra_state": extra}
    torch.save(model, tmp_path / "in.pt")
    conversion = convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch")
    found = torch.load(tmp_path / "out.pt")["model"]
    assert found.keys() == {"w", "b"}
    assert torch.equal(found["b"], model["b"])
    assert len(conversion.lost) == 1
    assert "'l._extra_state'" in conversion.lost[0]
    arguments = ("convert", tmp_path / "in.pt", tmp_path / "again.pt", "--to", "torch")
    with no_trace(tmp_path):
        code, _, error = call(*arguments, "--strict")
    assert (code, "not carried: 'l._extra_state'" in error) == (1, True), error
    code, _, error = call(*arguments)
    assert (code, "not carried: 'l._extra_state'" in error) == (0, True), error


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_numbers_in_states_keep_their_value(to: str, tmp_path: Path) -> None:
    state = {
        "step": torch.tensor(2**24 + 1),
        "exp_avg": torch.randn(3),
        "RMS": 0.1,
        "flag": True,
    }
    torch.save(file_of(state), tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out", to=to)
    convert(tmp_path / "out", tmp_path / "again.pt", to="torch", from_=to)
    found = torch.load(tmp_path / "again.pt", weights_only=True)["optimizer"]["state"][0]
    assert found.pop("exp_avg").equal(state["exp_avg"])
    assert {key: float(value) for key, value in found.items()} == {
        "step": 2.0**24 + 1,
        "RMS": 0.1,
        "flag": 1.0,
    }
    assert isinstance(found["step"], torch.Tensor)


ODD_STATES: dict[str, tuple[dict[Any, Any], dict[str, Any]]] = {
    "a dict of numbers": ({"by": {0: torch.ones(2)}}, {}),
    "keys that look like places": ({"by": {"0": torch.ones(2)}, "a.b": torch.ones(2)}, {}),
    "a number for a name": ({5: torch.ones(2)}, {}),
    "a tuple": ({"by": (torch.ones(2),)}, {}),
    "dicts": ({"by": {"a": {"b": 2}, "c": []}}, {"by": {"a": {"b": 2}, "c": []}}),
    "a list of numbers": ({"by": [1, 2.5, [None]]}, {"by": [1, 2.5, [None]]}),
}


@pytest.mark.parametrize("name", ODD_STATES)
def test_dicts_and_lists_in_states_are_the_same_or_lost(name: str, tmp_path: Path) -> None:
    given, expected = ODD_STATES[name]
    torch.save(file_of({"exp_avg": torch.ones(3), **given}), tmp_path / "in.pt")
    for source, to in (("in.pt", "torch"), ("in.pt", "dcp"), ("dcp", "again")):
        to_format = "torch" if to == "again" else to
        conversion = convert(tmp_path / source, tmp_path / to, to=to_format)
        assert bool(conversion.lost) == (source == "in.pt" and not expected)
    for file in ("torch", "again"):
        found = torch.load(tmp_path / file, weights_only=True)["optimizer"]["state"][0]
        assert found.pop("exp_avg").equal(torch.ones(3))
        assert found == expected


def test_dcp_has_no_empty_dict(tmp_path: Path) -> None:
    torch.save(file_of({"exp_avg": torch.ones(3), "by": {"a": {}}}), tmp_path / "in.pt")
    [lost] = convert(tmp_path / "in.pt", tmp_path / "out", to="dcp").lost
    assert "by.a of 'w': DCP has no empty dicts" in lost
    assert convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch").lost == []
    found = torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"]["state"][0]
    assert found["by"] == {"a": {}}


def test_files_of_different_steps_are_refused(tmp_path: Path) -> None:
    for step, name in ((3, "a"), (4, "b")):
        ours = {"step": step, "extra": "null"}
        torch.save({"model": {name: torch.ones(2)}, "tierstore": ours}, tmp_path / f"{name}.pt")
    with pytest.raises(
        CheckpointError, match=r"b\.pt is of step 4, and a file before it of step 3"
    ):
        convert([tmp_path / "a.pt", tmp_path / "b.pt"], tmp_path / "out", to="dcp")


def test_classes_are_not_values(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2), "c": torch.nn.Linear}}, tmp_path / "in.pt")
    conversion = convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch")
    assert torch.load(tmp_path / "out.pt", weights_only=True)["model"].keys() == {"w"}
    assert len(conversion.lost) == 1


def test_names_lose_the_prefix_of_a_wrapper_together(tmp_path: Path) -> None:
    value = file_of({"exp_avg": torch.ones(3)}, param_names=["module.w"])
    value["model"] = {"module.w": torch.ones(3), "buf": torch.ones(2)}
    torch.save(value, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch")
    found = torch.load(tmp_path / "out.pt")
    assert found["optimizer"]["param_groups"][0]["param_names"] == ["module.w"]
    assert found["model"].keys() == {"module.w", "buf"}
    value["optimizer"]["param_groups"][0]["param_names"] = ["other"]
    torch.save(value, tmp_path / "in.pt")
    with pytest.raises(tierstore.CheckpointError, match="the model has no tensor of this name"):
        convert(tmp_path / "in.pt", tmp_path / "no.pt", to="torch")
    convert(tmp_path / "in.pt", tmp_path / "model.pt", to="torch", only="model")


TENSOR = torch.ones(3)
WRONG = {
    "a state that is a number": file_of(5),
    "a step of two elements": file_of({"exp_avg": TENSOR, "step": torch.ones(2)}),
    "a complex step": file_of({"exp_avg": TENSOR, "step": torch.ones((), dtype=torch.cfloat)}),
    "a huge step": file_of({"exp_avg": TENSOR, "step": 10**400}),
    "no step": file_of({"exp_avg": TENSOR, "step": float("nan")}),
    "parameters that are dicts": file_of({"exp_avg": TENSOR}, params=[{}]),
    "a flag that is a list": file_of({"exp_avg": TENSOR, "use_muon": [1]}),
    "a learning rate of text": file_of({"exp_avg": TENSOR}, lr="a", adamw_lr_ratio=1.0),
    "extra of no JSON": {"model": {"w": TENSOR}, "tierstore": {"extra": "{"}},
    "extra that is a tensor": {"model": {"w": TENSOR}, "tierstore": {"extra": TENSOR}},
    "a step of text": {"model": {"w": TENSOR}, "tierstore": {"step": "abc"}},
}


@pytest.mark.parametrize("name", WRONG)
def test_values_of_other_types_are_refused(name: str, tmp_path: Path) -> None:
    refused(WRONG[name], tmp_path, r"in\.pt")


ODD = (None, True, -1, 1.5, 10**400, 2j, "x", b"x", [], [[]], {}, {0: TENSOR}, (1,), TENSOR)
ODD_TENSORS = (torch.ones(0), torch.tensor(2j), torch.tensor(True), torch.ones(2, 2).t())


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.long)])
def test_values_that_other_values_replace(count: int, tmp_path: Path) -> None:
    """Exit code 0, or 1 or 2 with a sentence: never a traceback."""
    numbers = random.Random(count)
    for _ in range(count):
        group = {"momentum": 0.9, "betas": (0.9, 0.99), "adamw_lr_ratio": 0.5}
        value = file_of({"exp_avg": TENSOR, "step": 3, "use_muon": True}, **group)
        value["tierstore"] = {"step": 3, "extra": "null"}
        places = [(value["tierstore"], key) for key in value["tierstore"]]
        places += [(value, "optimizer"), (value, "model"), (value["model"], "w")]
        places += [(value["optimizer"], key) for key in ("state", "param_groups")]
        places += [(g, key) for g in value["optimizer"]["param_groups"] for key in g]
        states = value["optimizer"]["state"]
        places += [(states, 0), *((states[0], key) for key in states[0])]
        container, key = numbers.choice(places)
        odd = numbers.choice([*ODD, *ODD_TENSORS])
        container[key] = odd
        torch.save(value, tmp_path / "in.pt")
        out = tmp_path / "out.pt"
        code, _, error = call("convert", tmp_path / "in.pt", out, "--to", "torch")
        assert code in (0, 1, 2), (key, odd, error)
        assert "Traceback" not in error, (key, odd)
        assert "fault of the converter" not in error, (key, odd)
        out.unlink(missing_ok=True)
