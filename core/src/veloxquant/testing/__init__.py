"""What tests and plugin authors need: a sample model, a sample text and toy models."""
