"""A row of the table of sampling parameters: int32 each.

`loraplex.server.kernels.sampling.draw` reads the table.

TEMPERATURE, TOP_P and MIN_P are the bits of a float32. SEED: 64 bits, in halves."""

TEMPERATURE, TOP_P, MIN_P, TOP_K, SEED_LOW, SEED_HIGH, CHOICE, PROMPT_LEN = range(8)
DRAW_COLUMNS = 8
