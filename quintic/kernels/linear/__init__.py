"""Linear layers: products fused with their activation, products of 8-bit floats, and transposed copies."""
