"""Ranks: how they meet, the grid that they form, how they agree, and what happens when one of them is gone."""
