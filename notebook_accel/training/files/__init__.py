"""Write states and weights into files, and read them again."""
