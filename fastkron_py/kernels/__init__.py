"""Device code and its launchers: a package for each operator, and here what they share.

kron, gated, rational, poly_kan     operators: kernels, launchers (``triton_*``, ``*_launch``), and the same in torch (``torch_*``)
tiling, products, gemm*             what kernels are built from; the main loop of a linear layer, which three operators finish
launcher, replay, recorder          launching compiled kernels again at little cost
approximations, optional_triton     functions in one instruction; Triton, or what stands for it
devices, precision, recipes         what a device can do, float32 products' precision, what a launch passes to its kernel
compilers, compile_worker           processes that compile
registry, reductions                things that users add by name; sums over rows

Importing this package imports neither Triton nor CUDA; the launchers do, on first use.
"""
