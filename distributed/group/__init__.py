"""Ranks: how they meet, the grid that they form, how they agree, and how they end when one of them is gone."""
