"""Who holds which columns, an exchange's cost, and which stages, chunks and transport a product takes: plain Python without tensors."""
