"""kv_append against a slow program of it: dense and paged caches, every type, lengths before and after, bad arrays."""

import cache_oracle
import ingot_ctypes as ingot
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import SIDES, FLOATS, Placed, lay_out

BACKENDS = ingot.kernels("kv_append")


@pytest.mark.parametrize("backend", BACKENDS)
def test_append(backend):
    @settings(max_examples=200)
    @given(
        seed=st.integers(0, 2**32),
        batch=st.integers(0, 3),
        heads=st.integers(1, 3),
        longest=st.integers(0, 5),
        rows=st.integers(0, 12),
        dims=st.tuples(*[st.sampled_from([1, 3, 8, 33])] * 2),
        dtype=st.sampled_from(FLOATS),
        eight=st.sampled_from(("", "") + ingot.EIGHTS),
        side=st.sampled_from(SIDES),
        pages=st.sampled_from(["", "dense", "csr", "last"]),
        size=st.sampled_from([1, 2, 3, 16]),
        after=st.booleans(),
        factors=st.sampled_from(["", "one", "head"]),
        only_k=st.booleans(),
        odd=st.integers(0, 2**20),
        bad=st.booleans(),
    )
    def run(seed, batch, heads, longest, rows, dims, dtype, eight, side, pages, size, after, factors, only_k, odd, bad):
        rng, layout = np.random.default_rng(seed), np.random.default_rng(odd) if odd % 3 else None
        after = after or pages == "last"
        rows = max(rows, 1) if pages in ("csr", "last") else rows
        new = lay_out(rng, side, batch, longest, bad)
        kind = eight or dtype
        names = ["k"] if only_k else ["k", "v"]
        fresh_shape = [1 if side[0] else batch, heads, new.rows]
        fields, placed = {}, {}
        for name, d in zip(names, dims):
            x = rng.standard_normal(fresh_shape + [d]) * 100
            placed[f"{name}_new"] = Placed(x.shape, dtype, layout).fill(ingot.encode_bits(x, dtype))
        ints = lambda name, x: placed.update(
            {name: Placed(np.shape(x), "i32").fill(np.asarray(x, np.int64).astype(np.int32))}
        )
        if new.lengths is not None:
            ints("new_lengths", new.lengths)
        if new.positions is not None:
            ints("new_positions", new.positions)

        # where the cache has its rows; each page belongs to one sequence, so that no two rows meet
        lists, length = None, 2
        if pages:
            per = -(-rows // size)
            count = batch * per + 2
            physical = rng.permutation(count)
            lists = [physical[b * per : (b + 1) * per] for b in range(batch)]
            if pages != "dense":
                lists = [x[: rng.integers(0, per + 1)] for x in lists]
            shape = [count, size, heads]
            held = [len(x) * size for x in lists]
            if pages == "dense":
                ints("page_table", np.stack(lists) if batch else np.zeros((0, per)))
                limit = per * size
            else:
                ints("page_indptr", np.concatenate([[0], np.cumsum([len(x) for x in lists])]))
                ints("page_indices", np.concatenate([np.zeros(0, np.int64), *lists]))
                fields["max_seqlen_k"] = limit = rows
            capacity = lambda b: min(held[b], limit)
        else:
            shape = [batch, heads, rows]
            capacity = lambda b: rows
        if pages == "last":
            length = 3
            last = np.array([int(rng.integers(1, size + 1)) for _ in range(batch)])
            lengths = np.array([(len(x) - 1) * size + n if len(x) else 0 for x, n in zip(lists, last)])
            # Not cut to the maximum: rows beyond it are dropped, those before them stay where they are.
            ints("k_lengths", last)
        else:
            lengths = rng.integers(0, rows + 1, batch)
            if bad and batch:
                lengths = np.where(
                    rng.random(batch) < 0.4, rng.choice([-3, rows + 2, 2**31 - 1, -(2**31)], batch), lengths
                )
            ints("k_lengths", lengths)
        if bad and (pages == "last" or after):
            return  # what a length after the append means is only defined for true ones
        for name, d in zip(names, dims):
            x = rng.standard_normal(shape + [d])
            placed[name] = Placed(x.shape, kind, layout).fill(ingot.encode_bits(x, kind))
            if eight and factors:
                f = 0.25 + rng.random([1] if factors == "one" else [batch, heads])
                placed[f"{name}_descale"] = Placed(f.shape, "f32").fill(f.astype(np.float32))

        def at(b, row):
            if not pages:
                return lambda h: (b, h, row)
            page = lists[b][row // size]
            return lambda h: (page, row % size, h)

        where = cache_oracle.rows_of(batch, new.side, new.rows, lengths, capacity, after, at)
        for x in placed.values():
            x.freeze()
        if side[0] or pages in ("csr", "last"):
            fields["batch"] = batch
        if side[0]:
            fields["max_seqlen_new"] = longest
        before = {name: placed[name].array.bits.copy() for name in names}
        ingot.kv_append(
            options=dict(backend=backend),
            varlen=ingot.varlen(side, (0, length, 0)),
            lengths_after=int(after),
            **fields,
            **{name: x.array for name, x in placed.items()},
        )
        for name, x in placed.items():
            if name not in names:
                assert x.untouched(), f"{name} was written"
                continue
            factor = placed.get(f"{name}_descale")
            scale = None
            if factor:
                table = factor.array.values
                scale = lambda b, h: table[0] if table.ndim == 1 else table[b, h]
            want = cache_oracle.append(
                before[name], placed[f"{name}_new"].array.values, where, scale, lambda row: ingot.encode_bits(row, kind)
            )
            raw = lambda bits: bits.view(f"u{bits.itemsize}")
            assert np.array_equal(raw(np.ascontiguousarray(x.array.bits)), raw(np.ascontiguousarray(want)))
            written = np.zeros(x.shape, bool)
            for _, _, _, place in where:
                for h in range(heads):
                    written[place(h)] = True
            assert x.untouched(written), f"wrote round {name}"

    run()


def test_saturates_and_keeps_nan():
    """A value beyond an 8-bit type's range becomes its largest finite one; NaN stays NaN."""
    values = np.array([1e9, -1e9, np.inf, -np.inf, np.nan, 0.0], np.float32)
    for dtype in ingot.EIGHTS:
        cache = ingot.empty((1, 1, 1, 6), dtype)
        ingot.kv_append(
            k_new=ingot.encode(values.reshape(1, 1, 1, 6), "f32"),
            k=cache,
            k_lengths=ingot.ints([0]),
            varlen=ingot.varlen(k=(0, 2, 0)),
        )
        got, most = cache.values[0, 0, 0], np.nanmax(
            np.where(np.isinf(ingot.EIGHT_TABLES[dtype]), 0, ingot.EIGHT_TABLES[dtype])
        )
        assert got[:4].tolist() == [most, -most, most, -most] and np.isnan(got[4]) and got[5] == 0, dtype
