"""kv_append as a slow program: where each new row goes, written from the header's words alone."""

import numpy as np


def append(cache, fresh, where, scale=None, to_storage=None):
    """Writes rows of fresh into a copy of cache. where: of rows_of; scale(b, head): the value stored is new / scale;
    to_storage turns values into the cache's bits."""
    cache = cache.copy()
    for b, slot_new, row_new, at in where:
        heads = fresh.shape[1]
        for h in range(heads):
            row = fresh[slot_new, h, row_new]
            if scale is not None:
                row = (row.astype(np.float32) / np.float32(scale(b, h))).astype(np.float32)
            cache[at(h)] = to_storage(row)
    return cache


def rows_of(count, new_side, new_rows, lengths, capacity, lengths_after, slots):
    """(sequence, slot and row of k_new, place in the cache) of every row that is written.

    lengths: each sequence's length as given; capacity(b): rows its slot or page list holds; slots(b, row): the cache's
    index of (head) for that row."""
    found = []
    for b in range(count):
        start, n = new_side.locate(b, new_rows)
        before = int(lengths[b]) - (n if lengths_after else 0)
        for t in range(n):
            row = before + t
            if 0 <= row < capacity(b):
                found.append((b, 0 if new_side.stacked else b, start + t, slots(b, row)))
    return found
