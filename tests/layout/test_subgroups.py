from __future__ import annotations

import io
import itertools
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.lone_layouts import cut_alone
from tierstore.layout.chunks import Chunk
from tierstore.layout.page_layout import BLOCK_BYTES, PageLayout, lay_out
from tierstore.layout.parameters import ParameterSpec
from tierstore.layout.records import (
    DATA_ALIGNMENT_BYTES,
    RECORD_DATA_BYTES_MAX,
    RECORD_PREFIX_BYTES,
    record_length,
    record_nbytes,
)
from tierstore.layout.subgroups import ParameterShard, Subgroup

SECTOR = 4096


def make_spec(
    name: str,
    shape: tuple[int, ...],
    *states: tuple[str, torch.dtype],
    dtype: torch.dtype = torch.float32,
    elementwise: bool = False,
) -> ParameterSpec:
    return ParameterSpec(
        name=name, shape=shape, dtype=dtype, states=states, elementwise=elementwise
    )


state_sets = st.sampled_from(
    [
        (),
        (("momentum_buffer", torch.bfloat16),),
        (("momentum_buffer", torch.float32),),
        (("exp_avg", torch.float32), ("exp_avg_sq", torch.float32)),
        (("exp_avg_sq", torch.float64), ("exp_avg", torch.int8)),
    ]
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
shapes = st.one_of(
    st.lists(st.integers(1, 12), max_size=4),
    st.lists(st.integers(0, 3), max_size=4),
    st.lists(st.integers(1, 120), min_size=2, max_size=2),
    st.lists(st.integers(1, 9000), min_size=1, max_size=1),
).map(tuple)


@st.composite
def spec_lists(draw: st.DrawFn, elementwise: bool | None = None) -> list[ParameterSpec]:
    count = draw(st.integers(0, 6))
    return [
        make_spec(
            f"layers.{index}.weight",
            draw(shapes),
            *draw(state_sets),
            dtype=draw(dtypes),
            elementwise=draw(st.booleans()) if elementwise is None else elementwise,
        )
        for index in range(count)
    ]


page_sizes = st.one_of(st.integers(SECTOR, 3 * SECTOR), st.integers(SECTOR, 2**18))


def flat_range(chunk: Chunk, shape: tuple[int, ...]) -> tuple[int, int]:
    """First and last flat position of a chunk, and that they are as far apart as it is large."""
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    first = sum(o * stride for o, stride in zip(chunk.offsets, strides, strict=True))
    steps = ((size - 1) * stride for size, stride in zip(chunk.sizes, strides, strict=True))
    stop = first + sum(steps) + 1
    assert stop - first == math.prod(chunk.sizes), "a chunk has a gap"
    assert all(
        offset + size <= extent
        for offset, size, extent in zip(chunk.offsets, chunk.sizes, shape, strict=True)
    )
    return first, stop


def shard_range(shard: ParameterShard) -> tuple[int, int]:
    """The flat range of a shard, whose chunks follow each other."""
    ranges = [flat_range(chunk, shard.parameter.shape) for chunk in shard.chunks]
    assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
    return ranges[0][0], ranges[-1][1]


def bytes_per_element(spec: ParameterSpec) -> int:
    # A master has four bytes, or the eight of a double.
    master = 8 if spec.dtype == torch.float64 else 4
    return master + sum(dtype.itemsize for _, dtype in spec.states)


def records_nbytes(subgroup: Subgroup) -> int:
    return sum(
        record_nbytes(chunk.sizes, dtype)
        for shard in subgroup.shards
        for chunk in shard.chunks
        for _, dtype in shard.parameter.all_states
    )


@given(spec_lists(), page_sizes)
def test_every_element_once_and_in_order(specs: list[ParameterSpec], page_bytes: int) -> None:
    subgroups = cut_alone(3, specs, page_bytes)
    assert all(subgroup.group == 3 and subgroup.shards for subgroup in subgroups)
    shards = [shard for subgroup in subgroups for shard in subgroup.shards]
    # Parameter after parameter, each from its first element to its last.
    found = [(name, list(run)) for name, run in itertools.groupby(shards, lambda s: s.parameter)]
    assert [parameter for parameter, _ in found] == [spec for spec in specs if 0 not in spec.shape]
    for parameter, run in found:
        ranges = [shard_range(shard) for shard in run]
        stops = [0, *(stop for _, stop in ranges)]
        assert ranges == list(itertools.pairwise(stops))
        assert stops[-1] == math.prod(parameter.shape)
        # The same again by looking at every element.
        positions = torch.arange(math.prod(parameter.shape)).reshape(parameter.shape)
        elements = [chunk.select(positions).flatten() for shard in run for chunk in shard.chunks]
        assert torch.equal(torch.cat(elements), positions.flatten())


@given(spec_lists(), page_sizes)
def test_a_parameter_has_at_most_one_shard_in_a_subgroup(
    specs: list[ParameterSpec], page_bytes: int
) -> None:
    for subgroup in cut_alone(0, specs, page_bytes):
        names = [shard.parameter.name for shard in subgroup.shards]
        assert len(set(names)) == len(names)


@given(spec_lists(), page_sizes)
def test_whole_parameters_stay_whole(specs: list[ParameterSpec], page_bytes: int) -> None:
    for subgroup in cut_alone(0, specs, page_bytes):
        for shard in subgroup.shards:
            if not shard.parameter.elementwise:
                assert shard_range(shard) == (0, math.prod(shard.parameter.shape))
                assert len(shard.chunks) == 1


@given(spec_lists(), page_sizes)
def test_cuts_are_at_rows_that_fit_half_a_page(specs: list[ParameterSpec], page_bytes: int) -> None:
    for subgroup in cut_alone(0, specs, page_bytes):
        for shard in subgroup.shards:
            row = math.prod(shard.parameter.shape[1:])
            if row * bytes_per_element(shard.parameter) <= page_bytes // 2:
                start, stop = shard_range(shard)
                assert start % row == stop % row == 0


def test_rows_over_half_a_page_are_cut() -> None:
    """Or the rest of each page, up to a row, would be left empty."""
    first, *_ = cut_alone(0, [make_spec("w", (10, 1000), elementwise=True)], 7999)
    assert shard_range(first.shards[0])[1] % 1000
    first, *_ = cut_alone(0, [make_spec("w", (10, 1000), elementwise=True)], 8000)
    assert shard_range(first.shards[0]) == (0, 1000)


@given(spec_lists(), page_sizes)
def test_pages_hold_about_page_bytes(specs: list[ParameterSpec], page_bytes: int) -> None:
    for subgroup in cut_alone(0, specs, page_bytes):
        layout = lay_out(subgroup)
        if records_nbytes(subgroup) <= page_bytes:
            # Sections are padded to whole sectors, which page_bytes does not count.
            assert layout.nbytes < page_bytes + SECTOR * len(layout.sections)
            continue
        # Larger: it holds one thing that cannot be cut, and nothing else.
        (shard,) = subgroup.shards
        if shard.parameter.elementwise:
            # A part of one row, whose framing alone takes half the page or more.
            (chunk,) = shard.chunks
            assert chunk.numel <= math.prod(shard.parameter.shape[1:])
            data_nbytes = chunk.numel * bytes_per_element(shard.parameter)
            assert data_nbytes <= page_bytes // 2 or chunk.numel == 1


@given(spec_lists(elementwise=False), page_sizes)
def test_whole_parameters_fill_pages_in_turn(specs: list[ParameterSpec], page_bytes: int) -> None:
    expected: list[list[str]] = []
    room = 0
    for spec in specs:
        if 0 in spec.shape:
            continue
        nbytes = sum(record_nbytes(spec.shape, dtype) for _, dtype in spec.all_states)
        if not expected or nbytes > room:
            expected.append([])
            room = page_bytes
        expected[-1].append(spec.name)
        room -= nbytes
    found = cut_alone(0, specs, page_bytes)
    assert [[shard.parameter.name for shard in page.shards] for page in found] == expected


@given(spec_lists(elementwise=True), page_sizes)
def test_cut_parameters_leave_no_room_for_a_row(
    specs: list[ParameterSpec], page_bytes: int
) -> None:
    for page, following in itertools.pairwise(cut_alone(0, specs, page_bytes)):
        parameter = following.shards[0].parameter
        row = math.prod(parameter.shape[1:])
        # One row more would bring its data, and perhaps a record of its own for each state.
        framing = record_nbytes((0,), torch.float32) + DATA_ALIGNMENT_BYTES
        if row * bytes_per_element(parameter) <= page_bytes // 2:
            more = row * bytes_per_element(parameter) + framing * len(parameter.all_states)
            assert records_nbytes(page) + more > page_bytes


def assert_layout_is_sound(layout: PageLayout, subgroup: Subgroup) -> None:
    position = 0
    found = []
    for section in layout.sections:
        # Sections follow each other, whole sectors each.
        assert section.extent.offset == position
        assert section.extent.offset % SECTOR == section.extent.nbytes % SECTOR == 0
        end = position + section.extent.nbytes
        for record in section.records:
            assert record.offset >= position
            assert record.offset % DATA_ALIGNMENT_BYTES == 0
            assert record.data_offset % DATA_ALIGNMENT_BYTES == 0
            assert record.data_offset == record.offset + RECORD_PREFIX_BYTES
            assert record.data_nbytes == record.chunk.numel * record.dtype.itemsize
            assert record.data_nbytes <= RECORD_DATA_BYTES_MAX
            assert record.state == section.state
            position = record.offset + record_length(record.chunk.sizes, record.dtype)
            found.append((record.parameter.name, record.chunk, record.state, record.dtype))
        assert end - SECTOR < position <= end  # No sector is empty.
        position = end
    assert position == layout.nbytes
    assert len(set(found)) == len(found)
    assert set(found) == {
        (shard.parameter.name, chunk, state, dtype)
        for shard in subgroup.shards
        for chunk in shard.chunks
        for state, dtype in shard.parameter.all_states
    }


@given(spec_lists(), page_sizes)
def test_layout(specs: list[ParameterSpec], page_bytes: int) -> None:
    for subgroup in cut_alone(0, specs, page_bytes):
        layout = lay_out(subgroup)
        assert layout.subgroup == subgroup
        assert_layout_is_sound(layout, subgroup)
        for section in layout.sections:
            for record in section.records:
                assert layout.records[record.parameter.name, record.chunk][record.state] == [record]
                own_master = record.dtype == record.parameter.dtype and record.state == "master"
                assert section.write_only == own_master
            assert section in layout.sections_of(section.state)
        count = sum(len(states) for states in layout.records.values())
        assert count == sum(len(section.records) for section in layout.sections)
        # What a step reads is one range, at the end.
        write_only = [section.write_only for section in layout.sections]
        assert write_only == sorted(write_only, reverse=True)
        assert layout.readable == [s for s in layout.sections if not s.write_only]


def assert_blocks_cover(layout: PageLayout) -> None:
    position = 0
    blocks = iter(layout.blocks)
    for section in layout.sections:
        end = position + section.extent.nbytes
        while position < end:
            block = next(blocks)
            assert block.offset == position
            assert block.nbytes == min(BLOCK_BYTES, end - position)
            position += block.nbytes
    assert next(blocks, None) is None
    for section in layout.sections:
        numbered = layout.blocks_of([section])
        assert [layout.blocks[place] for place, _ in numbered] == [b for _, b in numbered]
        assert [b for _, b in numbered] == section.blocks()
    assert layout.blocks_of(layout.sections) == list(enumerate(layout.blocks))
    assert layout.blocks_of([]) == []


@given(spec_lists(), page_sizes)
def test_blocks_of_small_pages(specs: list[ParameterSpec], page_bytes: int) -> None:
    for subgroup in cut_alone(0, specs, page_bytes):
        assert_blocks_cover(lay_out(subgroup))


def test_blocks_do_not_cross_sections() -> None:
    momentum = ("momentum_buffer", torch.bfloat16)
    (subgroup,) = cut_alone(0, [make_spec("w", (5000, 1000), momentum)], 2**28)
    layout = lay_out(subgroup)
    assert_blocks_cover(layout)
    # 20 MB of float32 and 10 MB of bfloat16, each with 758 bytes of framing, in sectors.
    first, second = 4883 * SECTOR, 2442 * SECTOR
    assert [(block.offset, block.nbytes) for block in layout.blocks] == [
        (0, BLOCK_BYTES),
        (BLOCK_BYTES, BLOCK_BYTES),
        (2 * BLOCK_BYTES, first - 2 * BLOCK_BYTES),
        (first, BLOCK_BYTES),
        (first + BLOCK_BYTES, second - BLOCK_BYTES),
    ]


def test_layout_of_a_mixed_page() -> None:
    """Written out by hand. Runs on disk are laid out so: a change needs a new format version."""
    momentum = ("momentum_buffer", torch.bfloat16)
    specs = [
        make_spec("half", (4, 8), momentum, dtype=torch.bfloat16),
        make_spec("full", (1025,), momentum),
        make_spec("empty", (0, 3), momentum),
    ]
    (subgroup,) = cut_alone(0, specs, 2**20)
    layout = lay_out(subgroup)
    found = [
        (s.state, s.write_only, s.extent.offset, s.extent.nbytes, [r.offset for r in s.records])
        for s in layout.sections
    ]
    # The framing of a record is 512 bytes before its data and 246 after it.
    assert found == [
        ("master", True, 0, 8192, [0]),  # full: 512 + 4100 + 246 bytes.
        ("master", False, 8192, 4096, [8192]),  # half: 512 + 128 + 246.
        # half takes 512 + 64 + 246, padded to 832.
        ("momentum_buffer", False, 12288, 4096, [12288, 12288 + 832]),
    ]
    assert layout.nbytes == 16384


@given(spec_lists(), page_sizes)
def test_partition_depends_on_specs_alone(specs: list[ParameterSpec], page_bytes: int) -> None:
    """As they come out of a commit: equal, but other objects."""
    loaded = [ParameterSpec.from_json(json.loads(json.dumps(spec.to_json()))) for spec in specs]
    subgroups = cut_alone(0, specs, page_bytes)
    again = cut_alone(0, loaded, page_bytes)
    assert again == subgroups
    assert [lay_out(subgroup) for subgroup in again] == [lay_out(s) for s in subgroups]


@given(spec_lists(), page_sizes)
def test_stamped_page_holds_records_that_torch_load_reads(
    specs: list[ParameterSpec], page_bytes: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    for subgroup in cut_alone(0, specs, page_bytes):
        layout = lay_out(subgroup)
        buffer = torch.full((layout.nbytes,), 0xAB, dtype=torch.uint8)
        records = [record for section in layout.sections for record in section.records]
        values = []
        for record in records:
            elements = torch.randint(-9, 9, record.chunk.sizes, generator=generator)
            values.append(elements.to(record.dtype))
            record.view(buffer).copy_(values[-1])
        layout.stamp(buffer, layout.sections)
        page = buffer.numpy().tobytes()
        outside = bytearray(page)
        for record, expected in zip(records, values, strict=True):
            end = record.offset + record_length(record.chunk.sizes, record.dtype)
            loaded = torch.load(io.BytesIO(page[record.offset : end]), weights_only=True)
            assert loaded.dtype == record.dtype
            assert torch.equal(loaded, expected)
            outside[record.offset : end] = bytes(end - record.offset)
        assert not any(outside), "what lies between records is not zero"


def test_stamp_leaves_other_sections_alone() -> None:
    momentum = ("momentum_buffer", torch.float32)
    (subgroup,) = cut_alone(0, [make_spec("w", (2000,), momentum)], 2**20)
    layout = lay_out(subgroup)
    buffer = torch.full((layout.nbytes,), 0xAB, dtype=torch.uint8)
    layout.stamp(buffer, layout.readable)
    assert (buffer[: layout.readable[0].extent.offset] == 0xAB).all()
    assert not (buffer[layout.readable[0].extent.offset :] == 0xAB).all()


@pytest.mark.parametrize(
    ("shape", "dtype", "records"),
    [
        ((70000, 70000), torch.float32, 10),  # 7669 rows of 280 kB in each.
        ((70000, 70000), torch.bfloat16, 10),  # As many: the master is float32.
        ((2, 2**30), torch.float32, 6),  # A little less than half a row in each of 5, one cut.
        ((3, 5, 2**27), torch.float64, 22),  # A little less than two rows: 2 + 6 * 3 + 2.
        ((2**33,), torch.float32, 17),
    ],
    ids=str,
)
def test_large_whole_parameter_is_cut_in_records(
    shape: tuple[int, ...], dtype: torch.dtype, records: int
) -> None:
    spec = make_spec("w", shape, ("momentum_buffer", torch.bfloat16), dtype=dtype)
    (subgroup,) = cut_alone(0, [spec], 2**28)
    (shard,) = subgroup.shards
    assert shard_range(shard) == (0, math.prod(shape))
    assert len(shard.chunks) == records
    layout = lay_out(subgroup)
    assert_layout_is_sound(layout, subgroup)
    assert_blocks_cover(layout)
    assert layout.nbytes < math.prod(shape) * bytes_per_element(spec) * 1.001


def test_large_embedding_is_cut_in_pages() -> None:
    states = (("exp_avg", torch.float32), ("exp_avg_sq", torch.float32))
    spec = make_spec("embedding", (128256, 16384), *states, elementwise=True)
    page_bytes = 2**28
    subgroups = cut_alone(0, [spec], page_bytes)
    shards = [shard for subgroup in subgroups for shard in subgroup.shards]
    assert len(shards) == len(subgroups)
    stops = [0, *(shard_range(shard)[1] for shard in shards)]
    assert [shard_range(shard) for shard in shards] == list(itertools.pairwise(stops))
    assert stops[-1] == math.prod(spec.shape)
    row_nbytes = 16384 * 12
    for subgroup in subgroups[:-1]:
        assert page_bytes - 2 * row_nbytes < lay_out(subgroup).nbytes <= page_bytes + 3 * SECTOR
