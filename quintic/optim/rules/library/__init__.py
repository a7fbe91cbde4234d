"""The update rules of the library, a file for each idea."""
