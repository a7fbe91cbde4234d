"""Update rules: values made of stages, and their formulas as the papers have them."""
