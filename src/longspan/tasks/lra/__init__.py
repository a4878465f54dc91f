"""The Long Range Arena (Tay et al. 2021): five tasks over sequences of 1,000 to 4,000 tokens."""
