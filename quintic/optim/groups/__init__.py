"""Parameter groups: names, classification, the registry of model families."""
