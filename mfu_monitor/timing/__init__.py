"""How long steps took and what they held: clocks, windows, tokens of a batch."""
