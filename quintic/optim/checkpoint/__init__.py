"""State dicts: saving and loading, matching of saved parameters, and other libraries' formats."""
