"""Chunks of JSON Lines read whole by Arrow, where every value has the plain type expected.

For anything else the answer is None and the objects have to be looked at one by one; so the two
ways cannot differ in what they accept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.readers.arrow_arrays import numbers, whole_numbers
from traces.readers.blocks import BlockIds
from traces.readers.files import Chunk, is_utf8
from traces.readers.layout import Layout
from traces.readers.rows import Batch
from traces.readers.rules import LARGEST_TOKENS
from traces.readers.times import TimeColumn


class ArrowJson:
    """Reads chunks whose values all have the types seen in the first object."""

    def __init__(
        self,
        sample: Mapping[str, Any],
        layout: Layout,
        times: TimeColumn | None,
        blocks: BlockIds | None,
    ) -> None:
        self.layout = layout
        self.times = times
        self.blocks = blocks
        self.schemas = list(self._schemas(sample))

    def batch(self, chunk: Chunk) -> Batch | None:
        """The rows of a chunk, or None where something in it needs a closer look."""
        if not is_utf8(chunk.data):
            return None
        for schema in list(self.schemas):
            table = _parsed(chunk, schema)
            if table is not None:
                # Chunks of one file are alike: try this one first from now on.
                self.schemas.remove(schema)
                self.schemas.insert(0, schema)
                return self._batch(chunk, table)
        return None

    def _schemas(self, sample: Mapping[str, Any]) -> Iterator[Any]:
        """Arrow schemas to try: arrival times as whole numbers or not, or as text."""
        import pyarrow as pa

        layout = self.layout
        fields = {layout.prompt: pa.int64(), layout.output: pa.int64()}
        fields |= dict.fromkeys(layout.numbers, pa.float64())
        for column in (layout.request_id, layout.session_id):
            if column is not None:
                fields[column] = pa.string() if isinstance(sample.get(column), str) else pa.int64()
        if layout.block_ids is not None:
            fields[layout.block_ids] = pa.list_(pa.int64())
        if layout.arrival is None:
            yield pa.schema(list(fields.items()))
            return
        moments: Sequence[Any] = [pa.int64(), pa.float64()]
        if isinstance(sample.get(layout.arrival), str):
            moments = [pa.string()]
        for moment in moments:
            yield pa.schema([*fields.items(), (layout.arrival, moment)])

    def _batch(self, chunk: Chunk, table: Any) -> Batch | None:
        layout = self.layout
        prompts, outputs = _token_array(table[layout.prompt]), _token_array(table[layout.output])
        if prompts is None or outputs is None:
            return None
        batch = Batch(
            lines=np.arange(chunk.first_line, chunk.first_line + len(prompts), dtype=np.int64),
            prompt_tokens=prompts,
            output_tokens=outputs,
        )
        for column in layout.numbers:
            values = numbers(table[column])
            if np.count_nonzero(~np.isfinite(values)) != table[column].null_count:
                return None
            batch.numbers[column] = values
        parts = self._add_names(batch, table) and self._add_times(batch, table)
        return batch if parts and self._add_blocks(batch, table) else None

    def _add_names(self, batch: Batch, table: Any) -> bool:
        layout = self.layout
        if layout.request_id is not None:
            ids = table[layout.request_id]
            batch.request_ids = [str(value).strip() for value in ids.to_pylist()]
            if ids.null_count or not all(batch.request_ids):
                return False
        if layout.session_id is not None:
            values = table[layout.session_id].to_pylist()
            batch.session_ids = [None if v is None else str(v).strip() or None for v in values]
        return True

    def _add_times(self, batch: Batch, table: Any) -> bool:
        import pyarrow as pa

        if self.times is None:
            return True
        array = table[self.layout.arrival]
        if array.null_count:
            return False
        if pa.types.is_string(array.type):
            batch.arrival = self.times.from_text_array(array) if self._are_stamps(array) else None
        elif pa.types.is_int64(array.type):
            batch.arrival = self.times.from_number_array(whole_numbers(array))
        else:
            batch.arrival = self.times.from_number_array(numbers(array))
        return batch.arrival is not None

    @staticmethod
    def _are_stamps(array: Any) -> bool:
        """A number in quotes is text in JSON, not a number: every text needs a date's dash."""
        import pyarrow.compute as pc

        return bool(pc.all(pc.match_substring_regex(array, "^[0-9]{4}-")).as_py())

    def _add_blocks(self, batch: Batch, table: Any) -> bool:
        import pyarrow as pa
        import pyarrow.compute as pc

        if self.blocks is None:
            return True
        lists = table[self.layout.block_ids]
        flat = pc.list_flatten(lists)
        if lists.null_count or flat.null_count:
            return False
        ids = self.blocks.from_array(whole_numbers(flat))
        if ids is None:
            return False
        batch.block_ids = ids
        batch.num_blocks = whole_numbers(pc.cast(pc.list_value_length(lists), pa.int64()))
        return True


def _parsed(chunk: Chunk, schema: Any) -> dict[str, Any] | None:
    """Key -> Arrow array, or None unless every line is one object of these types."""
    import pyarrow as pa
    import pyarrow.json as arrow_json

    try:
        table = arrow_json.read_json(
            pa.BufferReader(chunk.data),
            read_options=arrow_json.ReadOptions(use_threads=False, block_size=len(chunk.data) + 1),
            parse_options=arrow_json.ParseOptions(
                explicit_schema=schema, unexpected_field_behavior="ignore"
            ),
        )
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    if table.num_rows != chunk.data.count(b"\n") + chunk.is_torn:
        return None
    return {name: table[name].combine_chunks() for name in schema.names}


def _token_array(array: Any) -> NDArray[np.int64] | None:
    if array.null_count:
        return None
    values = whole_numbers(array)
    if int(values.min()) < 1 or int(values.max()) > LARGEST_TOKENS:
        return None
    return values
