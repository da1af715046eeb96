"""Trained models, and the tools that train them."""
