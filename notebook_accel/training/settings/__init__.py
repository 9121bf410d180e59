"""What a training function asks for: plugins, handlers, variables."""
