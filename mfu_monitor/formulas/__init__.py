"""Shapes to FLOPs and bytes: one formula an operator, each with its derivation."""
