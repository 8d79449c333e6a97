"""Facts about the operators and sites of a model, which the int8 model keeps for explanations and reports."""
