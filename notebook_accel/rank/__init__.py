"""What code in a rank asks of its launch, and what both sides know of it."""
