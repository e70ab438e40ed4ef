import numpy as np

from examples import draft_tree


def test_drafts_give_the_tokens_of_greedy_decoding_in_fewer_steps(capsys):
    assert draft_tree.main() == 0
    steps = [int(line.split()[-2]) for line in capsys.readouterr().out.splitlines()[1:]]
    greedy, drafts, *others = steps
    assert draft_tree.NEW_TOKENS - 1 == greedy > drafts
    assert others == [greedy, drafts]


def test_a_path_ends_where_the_model_says_something_else():
    tokens = np.array([9, 1, 2, 3, 4, 5, 6])
    for likeliest, path in (
        ([1, 3, 0, 0, 0, 0, 0], [0, 1, 3]),
        ([1, 7, 0, 0, 0, 0, 0], [0, 1]),
        ([4, 3, 0, 0, 6, 0, 0], [0, 4, 6]),
        ([8, 3, 0, 0, 6, 0, 0], [0]),
    ):
        assert draft_tree.accept(tokens, np.array(likeliest), draft_tree.PARENTS) == path
