"""The mathematics: every method; `longspan` itself lists the public names."""
