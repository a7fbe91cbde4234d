"""What a forward pass says of weights beside what names and sizes say, over the models of installed libraries."""
