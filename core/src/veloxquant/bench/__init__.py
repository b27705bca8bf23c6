"""Measurements of quality, speed and memory that users can run on their own models."""
