"""The command ``hf-cachegen``. Commands import torch and transformers only when they run."""

from hf_cachegen.cli.app import app

__all__ = ["app"]
