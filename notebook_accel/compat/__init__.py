"""Doors for code that imports the module paths of Accelerate; they open beside this package."""
