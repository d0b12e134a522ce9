"""The command ``audit``: claimed numbers held against each other."""
