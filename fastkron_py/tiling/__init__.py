"""The tiling core: device functions that operators share, and the main loop of linear layers."""
