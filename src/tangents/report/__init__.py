"""What a run leaves behind to look at. Needs the `plot` extra."""
