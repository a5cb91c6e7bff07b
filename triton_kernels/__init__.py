"""Triton kernels on raw tensors; docs/kernels.md counts what they cost.

- ``rans``: entropy streams to symbols or integers, and back. The codec's NumPy coder specifies it.
- ``delta``: integers of the ``delta`` codec to a layer's keys and values.
- ``transform``: integers of the ``transform`` codec to coefficients, and their product to the keys
  and values of a group of layers.
- ``pairs``: how both write to the cache.
- ``aot``: compiles every kernel for GPUs that are not here.

**Launching.** A launcher checks its arguments on the host, because a kernel cannot raise, and
launches on torch's current stream of the tensors' device. It never waits for the device: copies to
it come from pinned memory, and what only the data can tell (a damaged stream) is returned as a
tensor of flags to be read once the results are needed. To decode ahead of the model, call launchers
under ``torch.cuda.stream(side)``, record an event, and let the model's stream wait for it. Only
portable Triton is used, so that the kernels compile for CUDA and HIP.
"""
