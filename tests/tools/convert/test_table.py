"""The table of docs/reference/conversions.md: every source in every target, and what is carried.

What a source holds is known without the converter: from the program that wrote it, from truth
files, or from what torch, DCP and safetensors themselves read. So is what a destination holds.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import muon
import tierstore
from tests.support import stock_reader
from tests.support.continuation import hyperparameters_of
from tests.support.conversions import no_trace
from tests.support.deepspeed_files import classes_of_deepspeed
from tests.support.deepspeed_truth import truth_of
from tests.support.megatron import ITERATION, Truth, write_fsdp_dtensor, write_torch_dist
from tests.support.published import PAGE_BYTES, assert_equal, tensors_in
from tests.support.universal_files import folder_in, model_states_in, optimizer_in, states_in
from tierstore.run import tagged_json
from tierstore.tools.convert.convert import Conversion, convert

PAGE = Path(__file__).parents[3] / "docs/reference/conversions.md"
FIXTURES = Path(__file__).parent / "fixtures"
EXTRA = {"position": {"batch": (7, [torch.arange(3)])}}

CARRIED = {
    "all": {"optimizer", "others"},
    "all trained": {"optimizer"},
    "all, of Adam and AdamW": {"optimizer", "others"},
    "weights and buffers": {"others"},
    "weights": set[str](),
}
"""Cell -> what is carried beside the weights of parameters: "others" are buffers and frozen
tensors, "optimizer" is states, hyperparameters, the step and ``extra``."""

REFUSED = ("[begin from `dcp`](../guide/convert.md#convert-weights-alone)", "refused: no optimizer")


def table() -> dict[str, dict[str, str]]:
    """Source in the first column -> target -> cell."""
    lines = PAGE.read_text().split("\n\n")
    (rows,) = (part.splitlines() for part in lines if part.startswith("| from \\ to |"))
    head, _, *body = ([cell.strip() for cell in row.strip("|").split(" | ")] for row in rows)
    targets = [target.strip("` |") for target in head[1:]]
    return {
        head: dict(zip(targets, cells[1:], strict=True))
        for cells in body
        for head in re.split(", (?=`)", cells[0])  # A row may be of several sources.
    }


@dataclass(frozen=True, kw_only=True)
class Held:
    """The content of a checkpoint."""

    tensors: Mapping[str, torch.Tensor]
    """DCP key -> tensor: ``model.<name>`` and ``optimizer.state.<name>.<state>``."""
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Trained parameter -> its hyperparameters."""
    step: int | None = None
    extra: Any = None

    def only(self, *, optimizer: bool, others: bool) -> Held:
        """Return what a destination with less holds."""
        tensors = {
            key: tensor
            for key, tensor in self.tensors.items()
            if (optimizer if key.startswith("optimizer.") else others or self._is_trained(key))
        }
        if not optimizer:
            return Held(tensors=tensors)
        return Held(tensors=tensors, groups=self.groups, step=self.step, extra=self.extra)

    def counted(self) -> Held:
        """Return the same with the step; where no source tells it, it is the largest step count."""
        if self.step is not None:
            return self
        counts = [t.item() for key, t in self.tensors.items() if key.endswith(".step")]
        return replace(self, step=int(max(counts)))

    def _is_trained(self, key: str) -> bool:
        return not self.groups or key.removeprefix("model.") in self.groups


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint to convert, and what it holds."""

    paths: Path | list[Path]
    held: Held
    format: str
    dtype: torch.dtype = torch.float32
    """Of the model's parameters."""
    momentum_dtype: torch.dtype | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_muon(self) -> bool:
        return any(key.endswith(".momentum_buffer") for key in self.held.tensors)


# ---------------------------------------------------------------------------------- sources


def stock_groups(model: nn.Module, *, muon: bool) -> list[dict[str, Any]]:
    """Groups of Muon and AdamW, or two of AdamW; one parameter is frozen."""
    model.norm.bias.requires_grad_(False)
    matrices, others = stock_reader.split_parameters(model)
    first = stock_reader.MUON_OPTIONS if muon else stock_reader.ADAMW_OPTIONS
    second = {**stock_reader.ADAMW_OPTIONS, "weight_decay": 0.0}
    return [
        {"params": matrices, "algorithm": "muon" if muon else "adamw", **first},
        {"params": others, "algorithm": "adamw", **second},
    ]


def hyperparameters(groups: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Parameter -> hyperparameters, of param groups with names."""
    left_out = ("params", "param_names")
    return {
        name: {key: value for key, value in group.items() if key not in left_out}
        for group in groups
        for name in group.get("param_names", group["params"])
    }


def states_with_names(state: Mapping[str, Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """DCP key -> state of a parameter."""
    return {
        f"optimizer.state.{name}.{key}": torch.as_tensor(value).detach().clone()
        for name, values in state.items()
        for key, value in values.items()
    }


def trained_run(folder: Path, *, muon_: bool, publish: bool) -> Source:
    model = stock_reader.make_model("layers", 0, torch.bfloat16)
    groups = stock_groups(model, muon=muon_)
    with tierstore.TierStore(folder / "run", page_bytes=PAGE_BYTES) as store:
        optimizer = muon.Muon(groups, store=store)
        for step in (1, 2):
            stock_reader.train_step(model, [optimizer], step)
        store.register(position=EXTRA["position"])
        store.commit()
        tensors: dict[str, torch.Tensor] = {}
        for name, values in store.pages.read_states().items():
            states = dict(values)
            tensors[f"model.{name}"] = states.pop("master").clone()
            tensors |= states_with_names({name: {**states, **store.pages.scalars.get(name, {})}})
        if publish:
            store.checkpoint(folder / "published", model=model)
            tensors = {
                **{f"model.{n}": t.clone() for n, t in model.state_dict().items()},
                **tensors,
            }
    held = Held(
        tensors=tensors, groups=hyperparameters(optimizer.param_groups), step=2, extra=EXTRA
    )
    path = folder / ("published" if publish else "run")
    return Source(paths=path, held=held, format="tierstore", dtype=torch.bfloat16)


def trained_stock(folder: Path, *, muon_: bool, format_: str) -> Source:
    model = stock_reader.make_model("layers", 0)
    first, second = ({**group} for group in stock_groups(model, muon=muon_))
    kinds = [torch.optim.Muon if muon_ else torch.optim.AdamW, torch.optim.AdamW]
    optimizers = []
    for kind, group in zip(kinds, (first, second), strict=True):
        group.pop("algorithm")
        optimizers.append(kind(group.pop("params"), **group))
    for step in (1, 2):
        stock_reader.train_step(model, optimizers, step)
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {f"model.{name}": t.clone() for name, t in model.state_dict().items()}
    for optimizer in optimizers:
        tensors |= states_with_names({names[p]: s for p, s in optimizer.state.items()})
    groups = hyperparameters(g for optimizer in optimizers for g in optimizer.param_groups)
    if format_ == "dcp":
        state = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizers),
        }
        dcp.save(state, checkpoint_id=folder / "in", no_dist=True)
    else:
        saved = [optimizer.state_dict() for optimizer in optimizers]
        torch.save({"model": model.state_dict(), "optimizers": saved}, folder / "in.pt")
    path = folder / ("in" if format_ == "dcp" else "in.pt")
    return Source(paths=path, held=Held(tensors=tensors, groups=groups), format=format_)


def safetensors_file(folder: Path) -> Source:
    weights = {"a.weight": torch.randn(5, 4), "b": torch.randn(3).to(torch.bfloat16)}
    save_file(weights, folder / "in.safetensors")
    held = Held(tensors={f"model.{name}": tensor for name, tensor in weights.items()})
    return Source(paths=folder / "in.safetensors", held=held, format="safetensors")


def trainer(folder: Path) -> Source:
    case = FIXTURES / "huggingface/trainer-llama"
    weights = load_file(case / "checkpoint/model.safetensors")
    saved = torch.load(case / "checkpoint/optimizer.pt", weights_only=True)
    tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
    truth = truth_of(case)
    groups = {}
    steps = {saved["state"][number]["step"].item() for number in saved["state"]}
    assert steps == {3.0}
    names = [key.removeprefix("model.") for key in truth if key.startswith("model.")]
    for name in names:
        # Trainer decays all but biases and norms.
        (group,) = (
            g for g in saved["param_groups"] if (g["weight_decay"] == 0) == ("norm" in name)
        )
        groups |= hyperparameters([{**group, "params": [name]}])
        tensors[f"optimizer.state.{name}.step"] = torch.tensor(3.0)
    state = json.loads((case / "checkpoint/trainer_state.json").read_text())
    return Source(
        paths=[case / "checkpoint", case / "names.pt"],
        held=Held(tensors={**tensors, **truth}, groups=groups, step=state["global_step"]),
        format="huggingface",
        options={"assume_model_order": True},
    )


def torch_checkpointing(folder: Path) -> Source:
    case = FIXTURES / "torch_checkpointing/sharded"
    # All ranks have the same groups; the tensors are in the truth file, whole.
    of_lone = torch.load(case.with_name("lone") / "checkpoint/optimizer_0.pt", weights_only=True)
    groups = hyperparameters(of_lone["param_groups"])
    steps = {f"optimizer.state.{name}.step": torch.tensor(3.0) for name in groups}
    held = Held(tensors={**truth_of(case), **steps}, groups=groups, step=3)
    return Source(paths=case / "checkpoint", held=held, format="torch_checkpointing")


def of_deepspeed(name: str) -> Held:
    """Return the content of a case, from the engine that wrote it."""
    case = FIXTURES / "deepspeed" / name
    facts = json.loads((case / "facts.json").read_text())
    tensors = truth_of(case)
    with classes_of_deepspeed():
        path = case / "checkpoint/step3/mp_rank_00_model_states.pt"
        saved = torch.load(path, weights_only=False)
    others = ("positions", "frozen.weight")
    tensors |= {f"model.{key}": saved["module"][key].clone() for key in others}
    groups = {}
    for group, shapes in zip(facts["groups"], saved["param_shapes"], strict=True):
        values = dict(group["hyperparameters"])
        if "betas" in values:
            values["betas"] = tuple(values["betas"])
        if (is_muon := values.pop("use_muon", None)) is not None:
            values["algorithm"] = "muon" if is_muon else "adamw"
        for left_out in ("name", "ns_method"):
            values.pop(left_out, None)
        groups |= dict.fromkeys(shapes, values)
    for key in list(tensors):
        if key.endswith(".momentum_buffer"):
            assert torch.equal(tensors[key].bfloat16().float(), tensors[key])
            tensors[key] = tensors[key].bfloat16()
        if key.endswith(".exp_avg"):
            tensors[key.replace("exp_avg", "step")] = torch.tensor(3.0)
    return Held(tensors=tensors, groups=groups, step=3, extra={"seen": 7})


def deepspeed(folder: Path, name: str) -> Source:
    path = FIXTURES / "deepspeed" / name / "checkpoint"
    held = of_deepspeed(name)
    return Source(paths=path, held=held, format="deepspeed", dtype=torch.bfloat16)


def universal(folder: Path) -> Source:
    held = of_deepspeed("zero1-adamw")
    path = FIXTURES / "universal/zero1-adamw"
    written = {key: t for key, t in states_in(path).items() if not key.endswith(".step")}
    assert_equal(written, {key: held.tensors[key].float() for key in written})
    return Source(paths=path, held=held, format="universal", dtype=torch.bfloat16)


def megatron(folder: Path, *, muon_: bool) -> Source:
    truth = Truth(muon=muon_, experts=not muon_)
    (write_torch_dist if muon_ else write_fsdp_dtensor)(folder / "in", truth)
    kept = ("lr", "weight_decay", "momentum", "betas", "eps")
    groups = {
        name: {
            **{key: value for key, value in truth.group(name).items() if key in kept},
            "algorithm": "muon" if truth.is_muon(name) else "adamw",
        }
        for name in truth.masters
    }
    held = Held(tensors=truth.expected(), groups=groups, step=ITERATION)
    return Source(
        paths=folder / "in",
        held=held,
        format="megatron",
        dtype=torch.bfloat16 if muon_ else torch.float32,  # fsdp_dtensor has masters alone.
        momentum_dtype=torch.float32 if muon_ else None,
    )


SOURCES: dict[str, tuple[str, Callable[[Path], Source]]] = {
    "run-muon": ("`tierstore`: a run", lambda f: trained_run(f, muon_=True, publish=False)),
    "run-adamw": ("`tierstore`: a run", lambda f: trained_run(f, muon_=False, publish=False)),
    "published-muon": (
        "`tierstore`: a published",
        lambda f: trained_run(f, muon_=True, publish=True),
    ),
    "published-adamw": (
        "`tierstore`: a published",
        lambda f: trained_run(f, muon_=False, publish=True),
    ),
    "dcp-muon": ("`dcp`", lambda f: trained_stock(f, muon_=True, format_="dcp")),
    "dcp-adamw": ("`dcp`", lambda f: trained_stock(f, muon_=False, format_="dcp")),
    "torch-muon": ("`torch`", lambda f: trained_stock(f, muon_=True, format_="torch")),
    "torch-adamw": ("`torch`", lambda f: trained_stock(f, muon_=False, format_="torch")),
    "safetensors": ("`safetensors`", safetensors_file),
    "trainer": ("`huggingface`", trainer),
    "torch_checkpointing": ("`torch_checkpointing`", torch_checkpointing),
    "zero2-muon": ("`deepspeed`", lambda f: deepspeed(f, "zero2-muon")),
    "zero1-adamw": ("`deepspeed`", lambda f: deepspeed(f, "zero1-adamw")),
    "universal": ("`universal`", universal),
    "megatron-muon": ("`megatron`", lambda f: megatron(f, muon_=True)),
    "megatron-adamw": ("`megatron`", lambda f: megatron(f, muon_=False)),
}
"""Name -> the begin of the table's row, and what makes the source in a folder."""

TARGETS = ("tierstore", "dcp", "torch", "safetensors", "universal")


# ------------------------------------------------------------------------------ destinations


def read_run(out: Path, source: Source) -> Held:
    """Return the state of ``muon.Muon`` after restore(), with other hyperparameters before."""
    parameters: dict[str, nn.Parameter] = {}
    groups: list[dict[str, Any]] = []
    for names in grouped(source.held.groups):
        for name in names:
            shape = source.held.tensors[f"model.{name}"].shape
            parameters[name] = nn.Parameter(torch.full(shape, 7, dtype=source.dtype))
        is_muon = f"optimizer.state.{names[0]}.momentum_buffer" in source.held.tensors
        members = [(name, parameters[name]) for name in names]
        algorithm = "muon" if is_muon else "adamw"
        groups.append({"params": members, "algorithm": algorithm, "lr": 99.0})
    with tierstore.TierStore(out, resume=True) as store:
        optimizer = muon.Muon(groups, store=store, momentum_dtype=source.momentum_dtype)
        committed = store.committed.states
        store.register(**dict.fromkeys(committed))  # Left out, each by its name.
        step = optimizer.restore()
        tensors = {}
        for name, values in store.pages.read_states().items():
            states = dict(values)
            master = states.pop("master", parameters[name].detach()).clone()
            assert torch.equal(parameters[name].detach(), master.to(source.dtype)), name
            tensors[f"model.{name}"] = master
            tensors |= states_with_names({name: {**states, **store.pages.scalars.get(name, {})}})
        return Held(
            tensors=tensors,
            groups=hyperparameters(optimizer.param_groups),
            step=step,
            extra=committed,
        )


def grouped(groups: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """The parameters of each group, in order."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, values in groups.items():
        found[repr(values)].append(name)
    return list(found.values())


def decoded(extra: str | None) -> Any:
    """The value of ``extra``, which is tagged JSON in other formats."""
    return None if extra is None else tagged_json.decode(json.loads(extra))


def read_dcp(out: Path, source: Source) -> Held:
    tensors = {
        key: t
        for key, t in tensors_in(out).items()
        if key.startswith(("model.", "optimizer.state."))
    }
    keys = dcp.FileSystemReader(out).read_metadata().state_dict_metadata
    names = {key.split(".", 2)[2].rpartition(".")[0] for key in keys if "optimizer.state." in key}
    groups = {name: hyperparameters_of(out, name) for name in names}
    for values in groups.values():
        values.pop("param_names", None)
    state = {key: None for key in ("tierstore.step", "tierstore.extra") if key in keys}
    dcp.load(state, checkpoint_id=out, no_dist=True)
    return Held(
        tensors=tensors,
        groups=groups,
        step=state.get("tierstore.step"),
        extra=decoded(state.get("tierstore.extra")),
    )


def read_torch(out: Path, source: Source) -> Held:
    value = torch.load(out, weights_only=True)
    tensors = {f"model.{name}": tensor for name, tensor in value["model"].items()}
    optimizer = value.get("optimizer", {"state": {}, "param_groups": []})
    for group in optimizer["param_groups"]:
        for name, number in zip(group["param_names"], group["params"], strict=True):
            tensors |= states_with_names({name: optimizer["state"][number]})
    groups = hyperparameters(optimizer["param_groups"])
    notes = value.get("tierstore", {})
    extra = decoded(notes.get("extra"))
    return Held(tensors=tensors, groups=groups, step=notes.get("step"), extra=extra)


def read_safetensors(out: Path, source: Source) -> Held:
    found = load_file(out / "model.safetensors")
    return Held(tensors={f"model.{name}": tensor for name, tensor in found.items()})


def read_universal(out: Path, source: Source) -> Held:
    model = model_states_in(out)
    tensors = states_in(out)
    tensors |= {f"model.{name}": tensor for name, tensor in model["module"].items()}
    saved = optimizer_in(out)["param_groups"]
    groups = {}
    for group, shapes in zip(saved, model["param_shapes"], strict=True):
        groups |= hyperparameters([{**group, "params": list(shapes)}])
    assert {p.parent.name for p in folder_in(out).glob("zero/*/fp32.pt")} == groups.keys()
    wanted = source.held.extra or {}
    extra = {key: model[key] for key in wanted} or None
    return Held(tensors=tensors, groups=groups, step=model["global_steps"], extra=extra)


READ: dict[str, Callable[[Path, Source], Held]] = {
    "tierstore": read_run,
    "dcp": read_dcp,
    "torch": read_torch,
    "safetensors": read_safetensors,
    "universal": read_universal,
}


def assert_holds(found: Held, expected: Held, *, to: str) -> None:
    """Check that a destination holds what it is to hold, and no other tensor."""
    assert_equal(dict(found.tensors), dict(expected.tensors))
    assert found.step == (expected.counted() if to in ("tierstore", "universal") else expected).step
    if expected.extra is None:
        assert not found.extra
    else:
        assert {k: repr(found.extra[k]) for k in expected.extra} == {
            k: repr(v) for k, v in expected.extra.items()
        }
    assert found.groups.keys() == expected.groups.keys()
    for name, values in expected.groups.items():
        for key in values.keys() - (NOT_OF_A_RUN if to == "tierstore" else set()):
            value = values[key]  # Of dtypes, files of torch.save have the name.
            wanted = str(value) if to == "torch" and isinstance(value, torch.dtype) else value
            assert found.groups[name][key] == wanted, (name, key)


NOT_OF_A_RUN = {
    *("foreach", "capturable", "differentiable", "fused", "maximize", "amsgrad"),
    *("decoupled_weight_decay", "initial_lr"),
}
"""Hyperparameters of torch.optim that ``muon.Muon`` does not have."""


# ------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module", params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Source:
    return SOURCES[request.param][1](tmp_path_factory.mktemp(request.param))


@pytest.fixture
def row(request: pytest.FixtureRequest) -> dict[str, str]:
    """The table's row of the source."""
    begin = SOURCES[request.node.callspec.params["source"]][0]
    return row_of(begin)


def row_of(begin: str) -> dict[str, str]:
    (found,) = (cells for head, cells in table().items() if is_begin(begin, head))
    return found


def is_begin(begin: str, head: str) -> bool:
    return re.match(re.escape(begin) + r"(?!\w)", head) is not None


def converted(source: Source, out: Path, to: str) -> Conversion:
    return convert(source.paths, out, to=to, **source.options)


def test_every_row_has_a_source() -> None:
    begins = {begin for begin, _ in SOURCES.values()}
    for head, cells in table().items():
        assert tuple(cells) == TARGETS
        assert len([begin for begin in begins if is_begin(begin, head)]) == 1, head
    assert len(table()) == len(begins)


@pytest.mark.quick(6)
@pytest.mark.parametrize("to", TARGETS)
def test_cell(source: Source, row: dict[str, str], to: str, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    if row[to] in REFUSED:
        with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match="no optimizer"):
            converted(source, out, to)
        return
    carried = CARRIED[row[to]]
    if row[to].endswith("of Adam and AdamW") and source.has_muon:
        with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match="not of Muon"):
            converted(source, out, to)
        return
    conversion = converted(source, out, to)
    assert source.format in conversion.source.split(" and ")
    parts = {part: part in carried for part in ("optimizer", "others")}
    assert_holds(READ[to](out, source), source.held.only(**parts), to=to)


@pytest.mark.quick(3)
@pytest.mark.parametrize("source", [n for n in SOURCES if n != "safetensors"], indirect=True)
def test_round_trip_through_a_run(source: Source, tmp_path: Path) -> None:
    """Source -> tierstore -> source: only what a run does not hold is missing.

    What comes in a format that is not written goes to DCP.
    """
    to = source.format if source.format in TARGETS else "dcp"
    converted(source, tmp_path / "run", "tierstore")
    convert(tmp_path / "run", tmp_path / "again.pt", to=to)
    expected = source.held.only(optimizer=True, others=False).counted()
    assert_holds(READ[to](tmp_path / "again.pt", source), expected, to=to)


def test_round_trip_of_weights_through_a_run(tmp_path: Path) -> None:
    """Weights alone begin a run from a DCP directory, and come back from it."""
    weights = {"a.weight": torch.randn(5, 4), "a.bias": torch.randn(4)}
    save_file(weights, tmp_path / "in.safetensors")
    convert(tmp_path / "in.safetensors", tmp_path / "weights", to="dcp")
    parameters = [(n, nn.Parameter(torch.zeros(t.shape).bfloat16())) for n, t in weights.items()]
    with tierstore.TierStore(tmp_path / "run") as store:
        groups = [{"params": parameters, "algorithm": "adamw"}]
        assert muon.Muon(groups, store=store).restore(checkpoint=tmp_path / "weights") == 0
        store.commit()
    convert(tmp_path / "run", tmp_path / "out", to="safetensors")
    assert_equal(load_file(tmp_path / "out/model.safetensors"), weights)
