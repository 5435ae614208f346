"""Which factors are merged, fused and tiled: plain Python, without torch or Triton."""
