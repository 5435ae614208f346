"""Low-rank Kronecker adapters (LoKr): a layer's weight plus a scaled Kronecker product, which is never built."""
