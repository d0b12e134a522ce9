"""Counting of compiled graphs: their text, their products, their runs."""
