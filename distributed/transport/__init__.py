"""How blocks move between the ranks of a row group: packed for an all-to-all, or through the memory of their GPUs."""
