"""`optimizer.step()` alone, on one device and on several ranks."""
