from dashboard.uploads import keep_upload, without_folder
from traces.errors import TraceError
from traces.readers import read_trace


def test_an_upload_keeps_its_name_and_content() -> None:
    path = keep_upload("conv.csv.gz", b"content")
    assert path.name == "conv.csv.gz"
    assert path.read_bytes() == b"content"


def test_the_same_content_lies_in_the_same_place() -> None:
    assert keep_upload("a.csv", b"same") == keep_upload("a.csv", b"same")
    assert keep_upload("a.csv", b"same") != keep_upload("a.csv", b"other")


def test_a_name_cannot_leave_the_folder() -> None:
    path = keep_upload("../../outside.csv", b"content")
    assert path.parent.parent == keep_upload("inside.csv", b"content").parent.parent
    assert path.name == "outside.csv"


def test_an_error_message_calls_the_upload_by_its_own_name() -> None:
    path = keep_upload("conv.csv", b"")
    try:
        read_trace(path)
    except TraceError as error:
        message = str(error)
    assert without_folder(message) == "conv.csv: is empty: nothing to read"
