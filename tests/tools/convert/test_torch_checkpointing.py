"""Checkpoints that torch_checkpointing 0.1.1 wrote, from tests/tools/convert/fixtures."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.support.continuation import differences
from tests.support.conversions import no_trace
from tests.support.deepspeed_truth import assert_is_truth
from tests.support.huggingface_files import converted
from tests.support.published import tensors_in
from tierstore.inspection.reader import Reader
from tierstore.inspection.safe_pickle import StoredTensor, Unread
from tierstore.tools.convert.convert import convert
from tierstore.tools.convert.entries import StoredFile
from tierstore.tools.convert.rank_files import Held, parts_of_dtensors, whole

FIXTURES = Path(__file__).parent / "fixtures" / "torch_checkpointing"
NAMES = sorted(path.name for path in FIXTURES.iterdir())


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """Copy the checkpoint of a fixture, which a test then changes."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(FIXTURES / name / "checkpoint", tmp_path / "copy" / name))

    return copy


def refused(source: Path, tmp_path: Path, kind: type[Exception], match: str) -> None:
    with no_trace(tmp_path), pytest.raises(kind, match=match):
        convert(source, tmp_path / "out", to="dcp")


def change(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Write metadata again after an edit in place."""
    path = folder / "metadata.pkl"
    value = pickle.loads(path.read_bytes())
    edit(value)
    path.write_bytes(pickle.dumps(value))


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_carried(name: str, tmp_path: Path) -> None:
    conversion, tensors = converted(FIXTURES / name, tmp_path / "out", "dcp", names=False)
    assert (conversion.source, conversion.step) == ("torch_checkpointing", 3)
    assert_is_truth(tensors, FIXTURES / name)
    assert {float(tensors[key]) for key in tensors if key.endswith(".step")} == {3.0}
    (lost,) = conversion.lost
    assert lost.startswith("'train_state': neither the model")


@pytest.mark.parametrize(
    ("name", "to"), [("lone", "torch"), ("sharded", "tierstore"), ("sharded", "universal")]
)
def test_every_tensor_is_in_other_formats(name: str, to: str, tmp_path: Path) -> None:
    _, tensors = converted(FIXTURES / name, tmp_path / "out", to, names=False)
    assert_is_truth(tensors, FIXTURES / name)


@pytest.mark.parametrize("name", NAMES)
def test_the_next_update_equals_the_source(name: str, tmp_path: Path) -> None:
    converted(FIXTURES / name, tmp_path / "out", "dcp", names=False)
    assert max(differences(tmp_path / "out", FIXTURES / name)["adamw"].values()) < 1e-5
    without = differences(tmp_path / "out", FIXTURES / name, momentum=False)
    assert min(without["adamw"].values()) > 0.05


def test_files_that_are_not_read_are_named(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("lone")
    (folder / "config.json").write_text("{}")
    assert any("'config.json'" in one for one in convert(folder, tmp_path / "o", to="dcp").lost)


def test_ranks_that_hold_the_same(copied: Callable[[str], Path], tmp_path: Path) -> None:
    """Of HSDP: a mesh of replicas and shards, on one rank that all of them are."""
    folder = copied("lone-safetensors")
    shutil.copy(folder / "model_0.safetensors", folder / "model_1.safetensors")
    shutil.copy(folder / "optimizer_0.pt", folder / "optimizer_1.pt")

    def edit(metadata: dict[str, Any]) -> None:
        metadata["world_size"] = 2
        for item, described in metadata["metadata"].items():
            layouts = described["rank_to_layout_info"]
            layouts[1] = layouts[0] and {**layouts[0], "file_path": f"{item}_1.safetensors"}
            for groups in described["nested_path_to_metadata"].values():
                groups[0]["ranks"] = (0, 1)
                data = groups[0]["sharding_metadata"]["data"]
                data["mesh_spec"] = {"mesh_shape": (2, 1), "mesh_data": (0, 1)}
                data["placements"] = [{"type": "Replicate"}, {"type": "Shard", "dim": 0}]
                if not data["global_shape"]:
                    data["placements"][1] = {"type": "Replicate"}

    change(folder, edit)
    convert(folder, tmp_path / "out", to="dcp")
    assert_is_truth(tensors_in(tmp_path / "out"), FIXTURES / "lone-safetensors")


def test_dtensors_describe_themselves(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("sharded")
    (folder / "metadata.pkl").unlink()
    convert(folder, tmp_path / "out", to="dcp")
    assert_is_truth(tensors_in(tmp_path / "out"), FIXTURES / "sharded")
    shutil.rmtree(tmp_path / "out")
    (folder / "model_1.pt").unlink()
    refused(folder, tmp_path, tierstore.CorruptionError, "are in no chunk")


def test_plain_tensors_of_several_ranks_are_refused(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied("lone")
    shutil.copy(folder / "model_0.pt", folder / "model_1.pt")
    refused(folder, tmp_path, tierstore.CheckpointError, "is not a DTensor, but is in the files of")


def dtensor(
    mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: list[Unread], **more: Any
) -> Unread:
    """Return a DTensor of shape [8] as files have it."""
    axes = tuple(Unread("_FlatLayout", state={"shape": (n,)}) for n in mesh)
    layout = Unread("_MeshLayout", state={"axes": axes})
    spec = {
        "mesh": Unread("Mesh", state={"_layout": layout, "_coordinate_on_dim": coordinate}),
        "placements": tuple(placements),
        "tensor_meta": Unread("TensorMeta", arguments=((8,), (1,), torch.float32)),
        **more,
    }
    local = StoredTensor(0, torch.float32, (2,), (1,))
    return Unread("x", state={"_local_tensor": local, "_spec": Unread("Spec", state=spec)})


def placement(name: str, **fields: int) -> Unread:
    return Unread(f"torch.distributed.tensor.placement_types.{name}", state=fields)


@pytest.mark.parametrize(
    ("placements", "starts"),
    [
        ([placement("Shard", dim=0), placement("Shard", dim=0)], [0, 2, 4, 6]),
        # FSDP of tensor parallel parameters: the second dimension of the mesh cuts first.
        (
            [placement("_StridedShard", dim=0, split_factor=2), placement("Shard", dim=0)],
            [0, 4, 2, 6],
        ),
    ],
)
def test_parts_on_a_mesh(placements: list[Unread], starts: list[int]) -> None:
    coordinates = [(0, 0), (0, 1), (1, 0), (1, 1)]
    held = [
        Held(rank, StoredFile(Reader(Path()), f"{rank}"), dtensor((2, 2), one, placements))
        for rank, one in enumerate(coordinates)
    ]
    parts = parts_of_dtensors(("w",), held)
    assert [part.pieces[0].whole.offsets[0] for part in parts.values()] == starts
    assert all(part.local_shape == (2,) for part in parts.values())


def test_an_unusual_order_of_shards_is_refused() -> None:
    order = (Unread("ShardOrderEntry", arguments=(0, (1, 0))),)
    shards = [placement("Shard", dim=0), placement("Shard", dim=0)]
    value = dtensor((2, 2), (0, 0), shards, shard_order=order)
    with pytest.raises(tierstore.CheckpointError, match="of another form than torch"):
        whole([Held(0, StoredFile(Reader(Path()), "0"), value)], parts_of_dtensors)


@pytest.mark.parametrize(
    "state",
    [
        None,
        {"_spec": None},
        {"_spec": Unread("DTensorSpec", state={"mesh": Unread("DeviceMesh", state={"mesh": 3})})},
    ],
)
def test_dtensors_of_another_form_are_refused(state: Any) -> None:
    local = StoredTensor(0, torch.float32, (2,), (1,))
    value = Unread("wrapper", state={**(state or {}), "_local_tensor": local})
    held = Held(0, StoredFile(Reader(Path()), "model_0.pt"), value)
    with pytest.raises(tierstore.CheckpointError, match="of another form than torch"):
        whole([held], parts_of_dtensors)


def test_files_of_all_ranks_are_needed(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("sharded")
    (folder / "model_1.pt").unlink()
    refused(folder, tmp_path, tierstore.CorruptionError, "model_1.pt")


def test_an_item_without_description(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("sharded")
    change(folder, lambda metadata: metadata["metadata"].pop("optimizer"))
    convert(folder, tmp_path / "out", to="dcp")
    assert_is_truth(tensors_in(tmp_path / "out"), FIXTURES / "sharded")


def test_numbers_of_parameters_are_not_matched_with_sorted_names(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied("lone-safetensors")
    path = folder / "optimizer_0.pt"
    value = torch.load(path, weights_only=True)
    numbers: dict[str, int] = {}
    for group in value["param_groups"]:
        group["params"] = [numbers.setdefault(name, len(numbers)) for name in group["params"]]
    value["state"] = {numbers[name]: state for name, state in value["state"].items()}
    torch.save(value, path)

    def edit(metadata: dict[str, Any]) -> None:
        geometry = metadata["metadata"]["optimizer"]["nested_path_to_metadata"]
        for name, number in numbers.items():
            for key in [key for key in geometry if f'"{name}"' in key]:
                geometry[key.replace(f'"{name}"', str(number))] = geometry.pop(key)

    change(folder, edit)
    refused(folder, tmp_path, tierstore.CheckpointError, "shapes leave a choice")


def other(metadata: dict[str, Any], **values: Any) -> None:
    """Change the geometry of a matrix."""
    geometry = metadata["metadata"]["model"]["nested_path_to_metadata"]
    geometry['["up.weight"]'][0]["sharding_metadata"]["data"].update(values)


def offsets(metadata: dict[str, Any]) -> None:
    """State the rows of each rank as a tensor of a class of its own does."""
    geometry = metadata["metadata"]["model"]["nested_path_to_metadata"]
    groups = []
    for rank, (start, rows) in enumerate([(0, 4), (4, 3)]):
        data = {
            "global_shape": [7, 6],
            "global_offsets": [[start, 0]],
            "local_offsets": [[0, 0]],
            "local_sizes": [[rows, 6]],
            "dtype": "torch.float32",
        }
        sharding = {"type": "default_tensor_v1", "data": data}
        groups.append({"sharding_metadata": sharding, "ranks": (rank,)})
    geometry['["up.weight"]'] = groups


def test_parts_at_stated_offsets(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("sharded")
    change(folder, offsets)
    convert(folder, tmp_path / "out", to="dcp")
    assert_is_truth(tensors_in(tmp_path / "out"), FIXTURES / "sharded")


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda m: other(m, global_shape=[8, 6]), "has shape|are in no chunk"),
        (lambda m: other(m, global_shape=[6, 6]), "has shape"),
        (lambda m: other(m, global_shape=[7, -6]), "metadata.pkl"),
        (lambda m: other(m, placements=[{"type": "Partial"}]), "metadata.pkl"),
        (lambda m: other(m, placements=[{"type": "Shard", "dim": 5}]), "metadata.pkl"),
        (lambda m: other(m, placements=[{"type": "Replicate"}]), "has shape"),
        (lambda m: other(m, mesh_spec={"mesh_shape": (2,), "mesh_data": (0, 2)}), "metadata.pkl"),
        (lambda m: m.update(world_size=3), "metadata.pkl"),
        (lambda m: m.update(metadata=3), "metadata.pkl"),
        (lambda m: m["metadata"]["model"].clear(), "metadata.pkl"),
        (
            lambda m: m["metadata"]["model"]["rank_to_layout_info"].update(
                {0: {"file_path": "../model_0.pt"}}
            ),
            "leads elsewhere",
        ),
        (
            lambda m: m["metadata"]["model"]["nested_path_to_metadata"].pop('["up.weight"]'),
            "is not in metadata.pkl",
        ),
    ],
)
def test_metadata_that_does_not_fit_is_refused(
    edit: Callable[[dict[str, Any]], None],
    match: str,
    copied: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = copied("sharded")
    change(folder, edit)
    refused(folder, tmp_path, tierstore.TierstoreError, match)


def test_nothing_of_metadata_is_executed(copied: Callable[[str], Path], tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'executed'}",)

    folder = copied("sharded")
    (folder / "metadata.pkl").write_bytes(pickle.dumps(Hostile()))
    refused(folder, tmp_path, tierstore.CorruptionError, "metadata.pkl")
    (folder / "metadata.pkl").write_bytes(b"not a pickle")
    refused(folder, tmp_path, tierstore.CorruptionError, "metadata.pkl")
