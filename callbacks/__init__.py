"""Thin adapters to trainers: hooks in, monitor calls out."""
