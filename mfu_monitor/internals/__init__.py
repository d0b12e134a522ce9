"""What is not public in torch and the trainers: each with what it gives, since when, and what is lost without it."""
