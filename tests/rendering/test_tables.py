from twin_attention.interop.rendering.tables import Cell, numeric, to_html, to_markdown

GRID = [["case", "ms", "best", "heads"], ["4x8", "out of memory", "", "8/2"],
        ["1x2 | a", "1.10 (0.3%)", "0.79 (cuDNN)", "<8>"]]  # fmt: skip


def test_columns_of_numbers_may_hold_statuses_and_names_may_begin_with_digits():
    assert numeric(GRID) == [False, True, True, False]
    assert numeric([["ratio", "name"], ["inf", "infinite"]]) == [True, False]


def test_markdown():
    assert to_markdown(GRID).splitlines()[1:] == [
        "| --- | ---: | ---: | --- |",
        "| 4x8 | out of memory |  | 8/2 |",
        "| 1x2 \\| a | 1.10 (0.3%) | 0.79 (cuDNN) | <8> |",
    ]


def test_html():
    rows = [["a<b", Cell("1.5", "failed"), Cell("2", details=["<k>"])]]
    page = to_html(["name", "ratio", "kernels"], rows, ["lost"], filtered=True)
    assert page.startswith("<input")
    assert '<th>name<th class="number">ratio' in page
    assert '<tr class="lost"><td>a&lt;b<td class="number failed">1.5<td class="number">' in page
    assert "<details><summary>2</summary><ol><li>&lt;k&gt;</ol></details>" in page
    assert "<input" not in to_html(["name"], [["a"]])
