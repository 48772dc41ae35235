"""Native CPU kernels: C++ sources, their build, and the decoder that runs on them."""
