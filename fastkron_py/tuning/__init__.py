"""Which tile, which fusion, which launch: plans of kernels as plain data, without Triton."""
