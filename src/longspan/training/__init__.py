"""Training on transformers' Trainer: recipes of (task, method); needs longspan[train]."""
