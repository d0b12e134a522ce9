"""The command ``audit``: claimed figures held against each other."""
