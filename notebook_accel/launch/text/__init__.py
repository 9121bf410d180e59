"""Text: as a person reads it, as a terminal shows it, and where UTF-8 cannot carry it."""
