"""Which factors are multiplied out, fused and tiled: plain Python, without torch or Triton."""
