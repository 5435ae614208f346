"""The `torch.library` operators: schema, implementation, fake, autograd and vmap of each."""

from fastkron_py.ops import kron_matmul

__all__ = ["kron_matmul"]
