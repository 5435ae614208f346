"""Who holds which columns, what an exchange costs, and which stages, chunks and transport a product takes: plain Python without tensors."""
