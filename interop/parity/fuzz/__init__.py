"""Random problems of the whole contract: ``python -m interop.parity --fuzz SECONDS --seed N``."""
