"""Checkpoints on disk.

frozen_weights   large weights that no iteration changes are written once
loading          an optimizer comes back exactly where PyTorch's own Adam does the updates
state_templates  the recipe of a role's part, from its live objects: which bytes lie where
"""
