"""How states and weights become files, and are read again."""
