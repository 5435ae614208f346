"""The search for faster launch configurations, and the tables that keep them."""
