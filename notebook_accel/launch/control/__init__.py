"""What the kernel keeps of a run: its state, its stores, its verdict, and who asks for them."""
