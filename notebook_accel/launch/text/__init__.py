"""Text for people: wording of numbers and ranks, and cleaning of output and of invalid Unicode."""
