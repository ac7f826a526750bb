"""The plan: every row in exactly one place, bytes balanced, pins kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hybridpar as hp
from hybridpar.sharding import make_plan

tables = st.lists(
    st.tuples(
        st.integers(1, 60), st.sampled_from([2, 4, 8]),
        st.sampled_from([None, "table_wise", "row_wise"]),
    ),
    min_size=1,
    max_size=8,
)  # fmt: skip
SETTINGS = [hp.optim.SGD(), hp.optim.Adagrad(), hp.optim.RowWiseAdagrad()]


def specs_of(rows: list[tuple[int, int, str | None]]) -> list[hp.RemoteEmbeddingSpec]:
    return [
        hp.RemoteEmbeddingSpec(f"t{number}", num_embeddings=n, embedding_dim=d, sharding=pin)
        for number, (n, d, pin) in enumerate(rows)
    ]


@given(rows=tables, servers=st.integers(1, 4), settings=st.sampled_from(SETTINGS))
def test_every_logical_row_has_one_place(rows, servers: int, settings) -> None:
    specs = specs_of(rows)
    plan = make_plan(specs, servers, settings)
    taken = set()
    for spec in specs:
        placement = plan.placements[spec.name]
        assert spec.sharding in (None, placement.sharding)
        for row in range(spec.num_embeddings):
            shard = placement.shards[row % len(placement.shards)]
            local = row // len(placement.shards)
            assert local < shard.num_rows
            taken.add((shard.server, shard.slab, shard.first_row + local))
    slots = {
        (server, index, row)
        for server, slabs in enumerate(plan.slabs)
        for index, slab in enumerate(slabs)
        for row in range(slab.num_rows)
    }
    assert taken == slots
    assert len(slots) == sum(spec.num_embeddings for spec in specs)


@given(rows=tables, servers=st.integers(1, 4), settings=st.sampled_from(SETTINGS))
def test_bytes_are_those_of_weights_and_state(rows, servers: int, settings) -> None:
    specs = specs_of(rows)
    plan = make_plan(specs, servers, settings)
    for server, slabs in enumerate(plan.slabs):
        wanted = sum(
            slab.num_rows
            * (slab.embedding_dim + sum(settings.state_widths(slab.embedding_dim).values()))
            for slab in slabs
        )
        assert plan.num_bytes[server] == 4 * wanted
    assert sum(plan.num_bytes) == sum(
        spec.num_embeddings
        * 4
        * (spec.embedding_dim + sum(settings.state_widths(spec.embedding_dim).values()))
        for spec in specs
    )


@given(rows=st.lists(st.integers(100, 1000), min_size=1, max_size=20), servers=st.integers(1, 4))
def test_unpinned_tables_are_balanced(rows: list[int], servers: int) -> None:
    specs = specs_of([(n, 4, None) for n in rows])
    plan = make_plan(specs, servers, hp.optim.SGD())
    share = sum(plan.num_bytes) / servers
    largest_whole = max(
        (
            4 * 4 * spec.num_embeddings
            for spec in specs
            if plan.placements[spec.name].sharding == "table_wise"
        ),
        default=0,
    )
    assert max(plan.num_bytes) <= share + largest_whole + 4 * 4 * len(specs)


def test_a_table_above_its_share_is_spread_and_printed() -> None:
    specs = specs_of([(1000, 4, None), (10, 4, None), (10, 8, None)])
    plan = make_plan(specs, 2, hp.optim.SGD())
    assert plan.placements["t0"].sharding == "row_wise"
    assert plan.placements["t1"].sharding == "table_wise"
    assert "table t0: row_wise on ps0 (500 rows), ps1 (500 rows)" in str(plan)


def test_no_more_shards_than_rows() -> None:
    plan = make_plan(specs_of([(2, 4, "row_wise")]), 4, hp.optim.SGD())
    assert len(plan.placements["t0"].shards) == 2
    assert [len(slabs) for slabs in plan.slabs] == [1, 1, 0, 0]


def test_nothing_to_place() -> None:
    with pytest.raises(hp.SpecError):
        make_plan([], 1, hp.optim.SGD())
