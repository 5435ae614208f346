"""Parts of Gluon that Triton 3.6 and 3.9 call differently."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
begin_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
begin_described_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
