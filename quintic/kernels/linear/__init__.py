"""Linear layers: products with their activation, in 8 bits, and matrices written transposed."""
