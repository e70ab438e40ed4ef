import gzip
from dataclasses import replace

import pytest

from bench.records import Times, append, drop_unfinished_line, load, stem


def test_a_file_gives_back_what_was_appended_compressed_or_not(tmp_path, record):
    path = tmp_path / "new" / "records.jsonl"
    measured = record(
        times=Times(2.0, 1.9, 2.1, 1.8, 2.2),
        span=Times(2.5, 2.4, 2.6),
        host=Times(0.1, 0.1, 0.2),
        kernels=("copy", "flash_fwd"),
        gpu={"sm_mhz": 1980.0, "throttle": ["power cap"]},
    )
    failed = record(status="failed", message="RuntimeError: no kernel")
    append(path, [measured])
    append(path, [failed])
    back = load(path)
    case = measured.case | {"window_size": [48, 16]}  # JSON has no tuples
    assert back == [replace(measured, case=case), replace(failed, case=case)]
    assert [r.key for r in back] == [measured.key, failed.key]
    compressed = tmp_path / "records.jsonl.gz"
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    assert load(compressed) == back
    assert stem(compressed) == stem(path) == "records"


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(b"{}" * 99, mtime=0)[:-9]])
def test_a_file_that_is_not_compressed_as_it_says_is_named(tmp_path, content):
    path = tmp_path / "records.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"records\.jsonl\.gz: expected lines of JSON, got"):
        load(path)


@pytest.mark.parametrize(
    ("cut", "dropped", "left"), [(0, False, 2), (1, False, 2), (2, True, 1), (300, True, 1)]
)
def test_a_line_that_was_cut_short_is_dropped(tmp_path, record, cut, dropped, left):
    path = tmp_path / "records.jsonl"
    append(path, [record(), record(keys=2048)])
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - cut])
    assert drop_unfinished_line(path) == dropped
    append(path, [record(keys=4096)])
    assert len(load(path)) == left + 1


def test_the_key_is_of_the_measurement_and_not_of_what_it_found(record):
    now = record()
    assert record(status="failed", message="no", date="2027-01-01T00:00:00+00:00").key == now.key
    earlier, other = ({**now.case} for _ in range(2))
    assert earlier.pop("sinks") is False  # a field that earlier records lack
    assert replace(now, case=earlier).key == now.key
    assert replace(now, case=other | {"sinks": True}).key != now.key


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suite", "fa2"), ("keys", 2048), ("operation", "backward"),
        ("implementation", "jax triton"), ("target", "sm80"), ("device", "another"),
        ("versions", {"torch": "3.0"}), ("commit", "ba9876543210"),
    ],
)  # fmt: skip
def test_the_key_differs_with(field, value, record):
    assert record(**{field: value}).key != record().key


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("{}", "KeyError"),
        ('{"times": null, "span": null, "host": null, "kernels": [], "speed": 1}', "speed"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path, record, line, error):
    path = tmp_path / "records.jsonl"
    append(path, [record()])
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=rf"records\.jsonl:2: expected a record, got .*{error}"):
        load(path)


@pytest.mark.parametrize("fields", [{"times": None}, {"status": "failed", "times": Times(1, 1, 1)}])
def test_a_time_and_the_status_ok_go_together(record, fields):
    with pytest.raises(ValueError, match="times: expected only with status 'ok'"):
        record(**fields)
