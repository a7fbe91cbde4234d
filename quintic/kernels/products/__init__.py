"""The products of an orthogonalisation, and the norms before them."""
