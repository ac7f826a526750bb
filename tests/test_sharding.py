"""The plan: every row in exactly one place, bytes balanced, pins kept."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hybridpar as hp
from hybridpar.planner import make_plan, row_bytes

tables = st.lists(
    st.tuples(
        st.integers(1, 60), st.sampled_from([2, 4, 8]),
        st.sampled_from([None, "table_wise", "row_wise", "column_wise"]),
    ),
    min_size=1,
    max_size=8,
)  # fmt: skip
SETTINGS = [hp.optim.SGD(), hp.optim.Adagrad(), hp.optim.RowWiseAdagrad()]


def specs_of(rows, settings=SETTINGS[0], **more: object) -> list[hp.RemoteEmbeddingSpec]:
    return [
        hp.RemoteEmbeddingSpec(
            f"t{number}",
            num_embeddings=n,
            embedding_dim=d,
            sharding="row_wise" if pin == "column_wise" and settings.row_wise else pin,
            optimizer=settings,
            **more,
        )
        for number, (n, d, pin) in enumerate(rows)
    ]


@given(rows=tables, servers=st.integers(1, 4), settings=st.sampled_from(SETTINGS))
def test_every_value_has_one_place(rows, servers: int, settings) -> None:
    specs = specs_of(rows, settings)
    plan = make_plan(specs, servers)
    taken = []
    for spec in specs:
        placement = plan.placements[spec.name]
        assert spec.sharding in (None, placement.sharding)
        for row in range(spec.num_embeddings):
            count = placement.num_row_shards
            shards = [placement.shards[row % count]] if count > 1 else placement.shards
            columns = [
                c for s in shards for c in range(s.first_column, s.first_column + s.num_columns)
            ]
            assert columns == list(range(spec.embedding_dim))
            for shard in shards:
                assert row // count < shard.num_rows
                taken.append((shard.server, shard.slab, shard.first_row + row // count))
    slots = [
        (server, index, row)
        for server, slabs in enumerate(plan.slabs)
        for index, slab in enumerate(slabs)
        for row in range(slab.num_rows)
    ]
    assert sorted(taken) == sorted(slots)


@given(rows=tables, servers=st.integers(1, 4), settings=st.sampled_from(SETTINGS))
def test_bytes_are_those_of_weights_and_state(rows, servers: int, settings) -> None:
    specs = specs_of(rows, settings)
    plan = make_plan(specs, servers)
    for server, slabs in enumerate(plan.slabs):
        wanted = 0
        for slab in slabs:
            columns = slab.kind.num_columns
            state = sum(slab.kind.settings.state_widths(columns).values())
            wanted += 4 * slab.num_rows * (columns + state)
        assert plan.num_bytes[server] == wanted
    if not settings.row_wise:
        assert sum(plan.num_bytes) == sum(s.num_embeddings * row_bytes(s) for s in specs)


@given(rows=st.lists(st.integers(100, 1000), min_size=1, max_size=20), servers=st.integers(1, 4))
def test_unpinned_tables_are_balanced(rows: list[int], servers: int) -> None:
    specs = specs_of([(n, 4, None) for n in rows])
    plan = make_plan(specs, servers)
    share = sum(plan.num_bytes) / servers
    largest_whole = max(
        (
            16 * spec.num_embeddings
            for spec in specs
            if plan.placements[spec.name].sharding == "table_wise"
        ),
        default=0,
    )
    assert max(plan.num_bytes) <= share + largest_whole + 4 * 4 * len(specs)


def test_a_table_above_its_share_is_spread_and_printed() -> None:
    specs = specs_of([(1000, 4, None), (10, 4, None), (10, 8, None)])
    plan = make_plan(specs, 2)
    assert plan.placements["t0"].sharding == "row_wise"
    assert plan.placements["t1"].sharding == "table_wise"
    assert "table t0: row_wise on ps0 (500 rows), ps1 (500 rows)" in str(plan)


def test_no_more_shards_than_rows() -> None:
    plan = make_plan(specs_of([(2, 4, "row_wise")]), 4)
    assert len(plan.placements["t0"].shards) == 2
    assert [len(slabs) for slabs in plan.slabs] == [1, 1, 0, 0]


def test_no_server() -> None:
    with pytest.raises(hp.SpecError, match="on 0 servers"):
        make_plan([], 0)


def test_expected_ids_weigh_as_much_as_bytes() -> None:
    """Two hot small tables, two cold large ones: bytes alone would pair them badly."""
    sizes = {"hot0": (10, 50.0), "hot1": (10, 50.0), "cold0": (1000, 1.0), "cold1": (1000, 1.0)}
    specs = [
        hp.RemoteEmbeddingSpec(
            name, num_embeddings=n, embedding_dim=8, pooling_factor=ids, optimizer=SETTINGS[0]
        )
        for name, (n, ids) in sizes.items()
    ]
    plan = make_plan(specs, 2)
    server = {name: place.shards[0].server for name, place in plan.placements.items()}
    assert server["hot0"] != server["hot1"]
    assert server["cold0"] != server["cold1"]
    assert plan.ids_a_sample == (51.0, 51.0)


@pytest.mark.parametrize(
    ("mode", "ids", "dim", "cut"),
    [
        ("sum", 10.0, 64, "column_wise"),  # 2 partial sums of 64 cost more than ids sent twice
        ("sum", 200.0, 64, "row_wise"),  # so many ids that sending them twice costs more
        ("sum", 10.0, 8, "row_wise"),  # too narrow to cut
        (None, 10.0, 64, "row_wise"),  # every row travels anyhow
    ],
)
def test_a_spread_table_is_cut_the_cheaper_way(mode, ids: float, dim: int, cut: str) -> None:
    (spec,) = specs_of([(1000, dim, None)], mode=mode, pooling_factor=ids)
    assert make_plan([spec], 2).placements["t0"].sharding == cut


@pytest.mark.parametrize(
    ("settings", "more", "why"),
    [
        (hp.optim.RowWiseAdagrad(), {}, "RowWiseAdagrad"),
        (hp.optim.SGD(clip_norm=1.0), {}, "clip_norm=1.0"),
        (hp.optim.SGD(), {"max_norm": 1.0}, "max_norm"),
    ],
)
def test_what_looks_at_whole_rows_is_not_cut_by_columns(settings, more, why: str) -> None:
    spec = hp.RemoteEmbeddingSpec(
        "t", num_embeddings=10, embedding_dim=64, mode="sum", sharding="column_wise",
        pooling_factor=10.0, optimizer=settings, **more,
    )  # fmt: skip
    with pytest.raises(hp.SpecError, match=f"cannot be sharded column-wise: .*{why}"):
        make_plan([spec], 2)
    free = dataclasses.replace(spec, sharding=None)
    assert make_plan([free], 2).placements["t"].sharding == "row_wise"


def test_modules_go_round() -> None:
    specs = [
        hp.RemoteEmbeddingSpec(f"m{n}", module=torch.nn.Linear, optimizer=torch.optim.SGD)
        for n in range(3)
    ]
    plan = make_plan(specs, 2)
    assert plan.modules == {"m0": 0, "m1": 1, "m2": 0}
    assert "module m1: on ps1" in str(plan)
