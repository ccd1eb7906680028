"""What the Triton kernels share: narrow formats, random bits, launches."""
