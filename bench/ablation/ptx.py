"""PTX that both sides' ablations have."""

# Two registers as they are, when all warps of the block have come here. With the shipped
# configurations a thread has two rows of a tile, so that it waits once.
WAIT = "bar.sync 0; mov.b32 $0, $2; mov.b32 $1, $3;"
WAIT_CONSTRAINTS = "=r,=r,r,r"
WAIT_PACK = 2
