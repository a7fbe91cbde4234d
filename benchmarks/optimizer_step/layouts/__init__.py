"""`optimizer.step()` on several ranks, in every layout."""
