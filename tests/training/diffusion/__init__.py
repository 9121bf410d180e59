"""Scripts in the shape of diffusers' training examples, as their authors would run them."""
