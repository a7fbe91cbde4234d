"""What the forward pass says of weights beside what names, types and sizes say, over the models of installed libraries."""
