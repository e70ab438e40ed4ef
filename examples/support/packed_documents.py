"""Documents of different lengths for a toy model to learn, packed one after the other."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from examples.support.toy_model import VOCABULARY

LENGTHS = (23, 1, 9, 17)
TOKENS = 64  # with padding: the same for documents of other lengths, as compiled code needs it
NO_TARGET = -1


class Packed(NamedTuple):
    """A batch of packed documents.

    Attributes:
        tokens: [TOKENS], the documents' tokens, then padding.
        targets: [TOKENS], each token's successor; `NO_TARGET` at a document's end and in padding.
        offsets: [N + 1] int32, the documents' bounds.
    """

    tokens: np.ndarray
    targets: np.ndarray
    offsets: np.ndarray


def make_documents() -> Packed:
    """Make the same documents each time, in which each token tells the next one."""
    offsets = np.array([0, *accumulate(LENGTHS)], np.int32)
    tokens = np.zeros(TOKENS, np.int32)
    targets = np.full(TOKENS, NO_TARGET, np.int32)
    for first, (begin, end) in enumerate(pairwise(offsets)):
        tokens[begin:end] = (7 * first + 5 * np.arange(end - begin)) % VOCABULARY
        targets[begin : end - 1] = tokens[begin + 1 : end]
    return Packed(tokens, targets, offsets)
