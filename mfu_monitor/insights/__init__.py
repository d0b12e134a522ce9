"""What a step could reach, where the rest went, what would help, how long the run will take."""
