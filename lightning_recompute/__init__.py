"""Activation recomputation for any PyTorch Lightning project."""

from lightning_recompute.version import __version__

__all__ = ["__version__"]
