"""Azure LLM inference traces of 2023 and 2024.

CSV: TIMESTAMP (date stamp with up to nine decimals; from 2024 on with a zone offset),
ContextTokens, GeneratedTokens. Further columns, such as NumImages, are left aside.

Source:
    github.com/Azure/AzurePublicDataset; Patel et al., Splitwise, ISCA 2024.
"""

from __future__ import annotations

from traces.readers.csv_rows import CsvHeader, read_csv_columns
from traces.readers.layout import Layout, Names, Options
from traces.request import Trace

FORMAT = "azure-csv"


def matches(names: Names) -> bool:
    """Whether the header is one of these."""
    return names.has("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(header: CsvHeader, options: Options) -> Trace:
    """Read such a file."""
    layout = Layout(
        format=FORMAT,
        prompt=header.names.need("ContextTokens", FORMAT),
        output=header.names.need("GeneratedTokens", FORMAT),
        arrival=header.names.need("TIMESTAMP", FORMAT),
    )
    return read_csv_columns(header, layout, options).trace
