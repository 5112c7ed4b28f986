"""Chunks of CSV read whole by Arrow, where every field used is spelled plainly.

Plain are digits (12 or 12.0), a plain decimal number and a date stamp, in lines that are one row
each. For anything else the answer is None and the rows have to be looked at one by one; so the two
ways cannot differ in what they accept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.readers.arrow_arrays import numbers, whole_numbers
from traces.readers.files import Chunk, is_utf8
from traces.readers.layout import Layout
from traces.readers.rows import Batch
from traces.readers.rules import LARGEST_TOKENS
from traces.readers.times import TimeColumn

_PLAIN_TOKENS = "^[0-9]{1,10}$"
_PLAIN_WITH_POINT = r"^[0-9]{1,10}(\.0*)?$"
_PLAIN_NUMBER = r"^([0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?)?$"


def batch_by_arrow(
    chunk: Chunk,
    names: Sequence[str],
    delimiter: str,
    layout: Layout,
    times: TimeColumn | None,
) -> Batch | None:
    """The rows of a chunk, or None where something in it needs a closer look.

    Args:
        chunk: Whole lines; a quoted field must not reach beyond them.
        names: All columns of the file.
        delimiter: Between them.
        layout: Which are used for what.
        times: The reader of arrival times, None without them.
    """
    table = _text_table(chunk, names, delimiter, layout)
    if table is None:
        return None
    prompts = _plain_tokens(table[layout.prompt])
    outputs = _plain_tokens(table[layout.output])
    if prompts is None or outputs is None:
        return None
    batch = Batch(
        lines=np.arange(chunk.first_line, chunk.first_line + len(prompts), dtype=np.int64),
        prompt_tokens=prompts,
        output_tokens=outputs,
    )
    for column in layout.numbers:
        plain = _plain_numbers(table[column])
        if plain is None:
            return None
        batch.numbers[column] = plain
    if layout.request_id is not None:
        names = [name.strip() for name in table[layout.request_id].to_pylist()]
        if not all(names):
            return None
        batch.request_ids = names
    if layout.session_id is not None:
        batch.session_ids = [s.strip() or None for s in table[layout.session_id].to_pylist()]
    if times is not None:
        batch.arrival = times.from_text_array(table[layout.arrival])
        if batch.arrival is None:
            return None
    return batch


def _text_table(
    chunk: Chunk, names: Sequence[str], delimiter: str, layout: Layout
) -> dict[Any, Any] | None:
    """Column name -> Arrow array of strings; None unless every line is one row of UTF-8."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.csv as arrow_csv

    used = [column for column in layout.columns if column is not None]
    keys = {column: f"f{names.index(column)}" for column in used}
    if not is_utf8(chunk.data):
        return None
    try:
        table = arrow_csv.read_csv(
            pa.BufferReader(chunk.data),
            read_options=arrow_csv.ReadOptions(
                column_names=[f"f{i}" for i in range(len(names))],
                block_size=len(chunk.data) + 1,
                use_threads=False,
            ),
            parse_options=arrow_csv.ParseOptions(
                delimiter=delimiter, quote_char='"' if b'"' in chunk.data else False
            ),
            convert_options=arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(keys.values(), pa.string()),
                include_columns=list(keys.values()),
                null_values=[],
                strings_can_be_null=False,
            ),
        )
    except pa.ArrowInvalid:
        return None
    if table.num_rows != chunk.data.count(b"\n") + chunk.is_torn:
        return None
    arrays = {column: table[key].combine_chunks() for column, key in keys.items()}
    if b" " in chunk.data:
        return {column: pc.ascii_trim_whitespace(array) for column, array in arrays.items()}
    return arrays


def _plain_tokens(texts: Any) -> NDArray[np.int64] | None:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pc.all(pc.match_substring_regex(texts, _PLAIN_TOKENS)).as_py():
        if not pc.all(pc.match_substring_regex(texts, _PLAIN_WITH_POINT)).as_py():
            return None
        texts = pc.replace_substring_regex(texts, r"\.0*$", "")
    values = whole_numbers(pc.cast(texts, pa.int64()))
    if int(values.min()) < 1 or int(values.max()) > LARGEST_TOKENS:
        return None
    return values


def _plain_numbers(texts: Any) -> NDArray[np.float64] | None:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pc.all(pc.match_substring_regex(texts, _PLAIN_NUMBER)).as_py():
        return None
    filled = pc.replace_substring_regex(texts, "^$", "nan")
    values = numbers(pc.cast(filled, pa.float64()))
    return None if bool(np.isinf(values).any()) else values
