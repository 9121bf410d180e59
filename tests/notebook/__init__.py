"""Tests of what the person sees."""
