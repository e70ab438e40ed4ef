"""Random problems of the whole contract: parity's ``--fuzz SECONDS --seed N``."""
