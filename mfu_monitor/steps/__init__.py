"""Which steps are counted, and what the others hold."""
