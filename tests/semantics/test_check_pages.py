import pytest
import torch

from tests.mistakes import bf16, f32, i32, i64, mistake, refused

PAGES = "expected one of the pool's 9 pages, got "
SHARED = [[0, 1, 2, -1], [0, 3, 2, -1], [4, 1, 5, -1]]
WRITTEN = "expected a page that sequence 0 does not write to as well, got "


def check(side, tables, lengths, offsets=None, **options):
    arguments = {
        "k_pages": torch.zeros(9, 8, 2, 32),
        "block_tables": torch.tensor(tables).int(),
        "seq_lens": torch.tensor(lengths).int(),
    }
    if offsets is not None:
        arguments["cu_seqlens_q"] = torch.tensor(offsets).int()
    arguments = {name: x.to(side.device) for name, x in arguments.items()}
    assert side.api.check_pages(**side.share(arguments), **options) is None


def test_takes_what_is_right(side):
    check(side, [[0, 8, 3, 3], [-1, 99, 9, -7]], [32, 0])
    check(side, [[0, 8, 3, -1], [5, 99, 9, -7]], [24, 8])
    check(side, [[0, 1, -1, -1], [0, 2, -1, -1]], [10, 9], num_new_tokens=1)
    check(side, SHARED, [17, 20, 24], num_new_tokens=0)
    check(side, SHARED, [17, 16, 24])
    check(side, SHARED, [17, 20, 24], [0, 1, 1, 9])


@pytest.mark.parametrize(
    ("tables", "lengths", "options", "message"),
    [
        ([[0, 1, 2, 3]] * 2, [33, 5], {}, "seq_lens[0]: expected a length from 0 to 32, got 33"),
        ([[0, 1, -1, -1]] * 2, [9, -1], {}, "seq_lens[1]: expected a length from 0 to 32, got -1"),
        ([[0, 1, 9, -1]] * 2, [8, 17], {}, f"block_tables[1, 2]: {PAGES}9"),
        ([[0, -1, 9, -1]] * 2, [9, 99], {}, f"block_tables[0, 1]: {PAGES}-1"),
        # Sequences of 17 and of 20 keys both end in page 2; they may share the pages before.
        (SHARED, [17, 20, 24], {}, f"block_tables[1, 2]: {WRITTEN}2"),
        (SHARED, [17, 16, 17], {"num_new_tokens": 2}, f"block_tables[2, 1]: {WRITTEN}1"),
        (SHARED, [17, 20, 24], {"offsets": [0, 1, 5, 9]}, f"block_tables[1, 2]: {WRITTEN}2"),
        (
            SHARED, [17, 16, 24], {"offsets": [0, 2, 1, 4]},
            "cu_seqlens_q[2]: expected an offset from 2 to 2147483647, got 1",
        ),
        (SHARED, [17, 16, 24], {"offsets": [1, 2, 3, 4]}, "cu_seqlens_q[0]: expected 0, got 1"),
        (
            SHARED, [17, 16, 24], {"offsets": [0, 2, 3]},
            "cu_seqlens_q: expected shape (4,), got (3,)",
        ),
        (
            SHARED, [17, 16, 24], {"offsets": [0, 1, 2, 3], "num_new_tokens": 1},
            "num_new_tokens: expected None beside cu_seqlens_q, got 1",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_names_the_first_bad_number(side, tables, lengths, options, message):
    with refused(ValueError, message):
        check(side, tables, lengths, **options)


@pytest.mark.parametrize(
    ("number", "error"), [(65, ValueError), (-1, ValueError), (True, TypeError), (1.0, TypeError)]
)
def test_refuses_a_number_of_new_tokens(side, number, error):
    with refused(error, f"num_new_tokens: expected an integer from 0 to 64, got {number}"):
        check(side, [[0]], [1], num_new_tokens=number)


@pytest.mark.parametrize(
    "mistake",
    [
        mistake(
            ValueError, "k_pages: expected 4 dimensions [P, page_size, Hkv, D], got shape (9, 8)",
            k_pages=bf16(9, 8),
        ),
        mistake(
            NotImplementedError, "k_pages: expected a page size from 1 to 256, got 257",
            k_pages=bf16(9, 257, 2, 32),
        ),
        mistake(
            ValueError, "block_tables: expected shape (2, max_pages), got (8,)",
            block_tables=i32(8),
        ),
        mistake(TypeError, "block_tables: expected dtype int32, got int64", block_tables=i64(2, 4)),
        mistake(TypeError, "seq_lens: expected dtype int32, got float32", seq_lens=f32(2)),
        mistake(ValueError, "seq_lens: expected shape (5,), got (2,)", block_tables=i32(5, 4)),
        mistake(ValueError, "seq_lens: expected shape (2,), got ()", seq_lens=i32()),
        mistake(
            ValueError, "block_tables: expected shape (0, max_pages), got ()",
            block_tables=i32(), seq_lens=i32(),
        ),
    ],
    ids=lambda x: x.message,
)  # fmt: skip
def test_refuses_what_paged_decode_does(side, mistake):
    good = {"k_pages": bf16(9, 8, 2, 32), "block_tables": i32(2, 4), "seq_lens": i32(2)}
    with refused(mistake.error, mistake.message):
        side.api.check_pages(**{x: side.zeros(*y) for x, y in (good | mistake.changes).items()})
