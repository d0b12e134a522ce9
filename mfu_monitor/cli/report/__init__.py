"""The command ``report``: runs summed up, with their incidents."""
